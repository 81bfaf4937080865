"""Finding the attention modules of a model."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from cp_core import AttentionShape, InvalidInputError, UnsupportedError

from ._attention_settings import asks_config_for_attention, window_of
from ._forward_code import calls_sdpa
from ._model_spec import ModelSpec, model_spec
from ._names import ModuleNames, are_related, is_inside

# Families without a convolution of torch's, or whose name is the better one to show.
_RECURRENT_NAMES = re.compile(
    r"DeltaNet|Mamba\d*Mixer|ShortConv|LightningAttention|LinearAttention|Rwkv|Recurrent\w*Block|SSM"
)

_ATTENTION_FUNCTIONS = frozenset(
    {
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flex_attention",
        "npu_fusion_attention",
        "scaled_dot_product_attention",
    }
)


def find_attention_boundaries(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return every attention of a model by module name, in the model's order.

    Names are the user's: what torch.compile, activation checkpointing, FSDP, DDP or PEFT put around a module is left
    out. Attentions are the innermost modules that carry a mark of one: a transformers config beside `is_causal`,
    `torch.nn.MultiheadAttention`, a class named `...Attention`, or a forward that names an attention function or calls
    torch's through methods and functions of its own. A registered model spec says which module stands for an attention
    of its family, marked or not.

    Raises:
        InvalidInputError: If a spec's targets match no module.
    """
    return find_attentions(ModuleNames.of(model))


def find_attentions(names: ModuleNames) -> dict[str, torch.nn.Module]:
    """Return what `find_attention_boundaries` does, for names that are at hand."""
    marked = {name: module for name, module in names.modules.items() if _looks_like_attention(module)}
    found = {name for name, module in marked.items() if not _contains_another(module, marked)}
    for root, spec in _families(names):
        targets = {name for name in names.modules if is_inside(name, root) and _is_target(name, root, spec)}
        if not targets:
            raise InvalidInputError(
                f"the model spec of {spec.architecture!r} targets {', '.join(spec.attention_targets)}, which match no "
                f"module of {type(names.modules[root]).__name__}."
            )
        # A spec says which module stands for an attention; it cannot make one disappear.
        found = {name for name in found if not any(are_related(name, target) for target in targets)} | targets
    return {name: module for name, module in names.modules.items() if name in found}


def model_specs_in(model: torch.nn.Module) -> list[ModelSpec]:
    """Return the registered specs of the families inside a model, in the model's order."""
    return [spec for _, spec in _families(ModuleNames.of(model))]


def _families(names: ModuleNames) -> Iterator[tuple[str, ModelSpec]]:
    """Yield the outermost modules of a family that has a spec."""
    roots: list[str] = []
    for name, module in names.modules.items():
        spec = model_spec(getattr(getattr(module, "config", None), "model_type", None))
        if spec is not None and not any(is_inside(name, root) for root in roots):
            roots.append(name)
            yield name, spec


def _is_target(name: str, root: str, spec: ModelSpec) -> bool:
    relative = name.removeprefix(f"{root}.") if root else name
    return any(fnmatchcase(relative, target) for target in spec.attention_targets)


def unserved_token_mixers(names: ModuleNames, boundaries: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the modules outside the boundaries that mix tokens along the sequence: convolutions and recurrences.

    No method serves them: on each rank they would start from nothing in the middle of the sequence.
    """
    served = {id(inner) for boundary in boundaries.values() for inner in boundary.modules()}
    found: dict[str, torch.nn.Module] = {}
    for name, module in names.modules.items():
        if id(module) not in served and _mixes_tokens(module) and not any(is_inside(name, outer) for outer in found):
            found[name] = module
    return found


def _mixes_tokens(module: torch.nn.Module) -> bool:
    by_kind = isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d | torch.nn.RNNBase)
    return by_kind or _RECURRENT_NAMES.search(type(module).__name__) is not None


def attention_shape(module: torch.nn.Module, fqn: str, *, device: torch.device | None = None) -> AttentionShape:
    """Return the heads of a transformers attention module.

    Args:
        module: The attention.
        fqn: Its name, for errors.
        device: Where it will run; None is where its parameters are.

    Raises:
        UnsupportedError: If the module has no config to read them from.
    """
    config: Any = getattr(module, "config", None)
    num_q_heads = getattr(config, "num_attention_heads", None)
    head_dim = getattr(module, "head_dim", None)
    parameter = next(module.parameters(), None)
    found = {"config.num_attention_heads": num_q_heads, "head_dim": head_dim, "parameters": parameter}
    lacking = [name for name, value in found.items() if value is None]
    if num_q_heads is None or head_dim is None or parameter is None:
        raise UnsupportedError(
            f"{fqn} ({type(module).__name__}) lacks {', '.join(lacking)}; this version wraps attention modules of "
            "transformers that have them."
        )
    return AttentionShape(
        num_q_heads=num_q_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_q_heads,
        head_dim=head_dim,
        dtype=parameter.dtype,
        device=device or parameter.device,
        fqn=fqn,
        window=window_of(module),
    )


def _looks_like_attention(module: torch.nn.Module) -> bool:
    named = type(module).__name__.endswith("Attention") or isinstance(module, torch.nn.MultiheadAttention)
    return named or asks_config_for_attention(module) or _calls_attention(module)


def _calls_attention(module: torch.nn.Module) -> bool:
    """Whether the module's own forward names an attention function, or calls torch's through functions of its own."""
    forward = getattr(type(module).__dict__.get("forward"), "__code__", None)
    named = forward is not None and not _ATTENTION_FUNCTIONS.isdisjoint(forward.co_names)
    return named or calls_sdpa(module)


def _contains_another(module: torch.nn.Module, marked: dict[str, torch.nn.Module]) -> bool:
    inside = {id(child) for child in module.modules()} - {id(module)}
    return any(id(other) in inside for other in marked.values())
