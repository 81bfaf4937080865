"""Which activations between the split modules of a model may be sharded along the sequence; needs no ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cp_wrappers import Fault

# Families whose decoder is tried, parameter by parameter; their layers hand a residual stream on and nothing else, and
# have these norms before these modules.
PROVEN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_NORM_BEFORE = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallelPlan:
    """Where the residual stream is cut into shards of tokens, and where it is whole."""

    # The first decoder layer, whose input is cut.
    first_layer: str
    # Modules of split linear layers, whose output comes out cut, and the norms before them.
    dense: tuple[str, ...]
    norms_before_dense: tuple[str, ...]
    # Modules around experts, whose output is summed and then cut.
    experts: tuple[str, ...]
    # The norms before these, and the last one.
    other_norms: tuple[str, ...]
    # Parameters that see one rank's tokens only: those of all norms.
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
    layers = [f"{prefix}.layers.{index}" for index in range(len(base.layers))]
    parts = {f"{layer}.{part}": f"{layer}.{norm}" for layer in layers for part, norm in _NORM_BEFORE.items()}
    dense = {part: norm for part, norm in parts.items() if f"{part}.experts" not in styles}
    experts = {part: norm for part, norm in parts.items() if part not in dense}
    last_norm = f"{prefix}.norm"
    plan = SequenceParallelPlan(
        first_layer=layers[0],
        dense=tuple(dense),
        norms_before_dense=tuple(dense.values()),
        experts=tuple(experts),
        other_norms=(*experts.values(), last_norm),
        partial=tuple(
            f"{norm}.{name}"
            for norm in (*parts.values(), last_norm)
            for name, _ in model.get_submodule(norm).named_parameters()
        ),
    )
    return plan, ()
