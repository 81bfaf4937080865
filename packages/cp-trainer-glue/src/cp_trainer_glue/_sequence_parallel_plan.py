"""Which activations between the split modules of a model may be sharded along the sequence; needs no ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cp_wrappers import Fault

# Families whose decoder hands a residual stream through its layers and nothing else, tried parameter by parameter.
PROVEN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallelPlan:
    """Where the residual stream is cut into shards of tokens, and where it is whole."""

    # The first decoder layer, whose input is cut, and the last norm, whose output is gathered.
    first_layer: str
    last_norm: str
    # Modules of split linear layers: the stream is gathered before them, and their sum comes out cut.
    dense: tuple[str, ...]
    # Modules around experts: gathered before, summed, and cut behind.
    experts: tuple[str, ...]
    # Parameters that see one rank's tokens only.
    partial: tuple[str, ...]


def plan_sequence_parallel(
    model: torch.nn.Module, styles: Mapping[str, str]
) -> tuple[SequenceParallelPlan | None, tuple[Fault, ...]]:
    """Return the plan, or why there is none.

    Args:
        model: The whole model.
        styles: The style of each of its parameters and modules.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in PROVEN_FAMILIES:
        message = (
            f"sequence_parallel: proven for {', '.join(PROVEN_FAMILIES)} and not for {model_type}; leave "
            "sequence_parallel false."
        )
        return None, (Fault(message=message, unsupported=True),)
    base: Any = model.base_model
    prefix = next(name for name, module in model.named_modules() if module is base)
    layers = [(f"{prefix}.layers.{index}", layer) for index, layer in enumerate(base.layers)]
    parts = {f"{name}.{child}": part for name, layer in layers for child, part in layer.named_children()}
    split = {name for name in parts if any(place.startswith(f"{name}.") for place in styles)}
    dense = tuple(name for name in parts if name in split and styles.get(f"{name}.experts") is None)
    norms = {**{name: part for name, part in parts.items() if name not in split}, f"{prefix}.norm": base.norm}
    plan = SequenceParallelPlan(
        first_layer=layers[0][0],
        last_norm=f"{prefix}.norm",
        dense=dense,
        experts=tuple(name for name in parts if name in split and name not in dense),
        partial=tuple(_parameters(norms)),
    )
    return plan, ()


def _parameters(modules: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    for prefix, module in modules.items():
        for name, _ in module.named_parameters():
            yield f"{prefix}.{name}"
