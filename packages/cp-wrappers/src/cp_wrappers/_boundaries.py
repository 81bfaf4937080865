"""Finding the attention modules of a model."""

from fnmatch import fnmatchcase
from typing import Any

import torch

from cp_core import AttentionShape, InvalidInputError, UnsupportedError

from ._model_spec import model_spec


def find_attention_boundaries(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return every attention of a model by full module name, in the model's order.

    A registered model spec says where they are; else they are the innermost modules that carry the marks of an
    attention: a transformers config beside `is_causal`, `torch.nn.MultiheadAttention`, or a class named `...Attention`.

    Raises:
        InvalidInputError: If the spec's targets match no module.
    """
    modules = dict(model.named_modules())
    spec = model_spec(getattr(getattr(model, "config", None), "model_type", None))
    if spec is not None:
        found = {n: m for n, m in modules.items() if any(fnmatchcase(n, target) for target in spec.attention_targets)}
        if not found:
            raise InvalidInputError(
                f"the model spec of {spec.architecture!r} targets {', '.join(spec.attention_targets)}, which match no "
                f"module of {type(model).__name__}."
            )
        return found
    marked = {name: module for name, module in modules.items() if _looks_like_attention(module)}
    return {name: module for name, module in marked.items() if not _contains_another(module, marked)}


def attention_shape(module: torch.nn.Module, fqn: str) -> AttentionShape:
    """Return the heads of a transformers attention module.

    Raises:
        UnsupportedError: If the module has no config to read them from.
    """
    config: Any = getattr(module, "config", None)
    num_q_heads = getattr(config, "num_attention_heads", None)
    head_dim = getattr(module, "head_dim", None)
    parameter = next(module.parameters(), None)
    if num_q_heads is None or head_dim is None or parameter is None:
        raise UnsupportedError(
            f"{fqn} ({type(module).__name__}) has no config with num_attention_heads and no head_dim; this version "
            "wraps attention modules of transformers that have both."
        )
    return AttentionShape(
        num_q_heads=num_q_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_q_heads,
        head_dim=head_dim,
        dtype=parameter.dtype,
        device=parameter.device,
        fqn=fqn,
    )


def _looks_like_attention(module: torch.nn.Module) -> bool:
    from_transformers = hasattr(module, "is_causal") and hasattr(
        getattr(module, "config", None), "_attn_implementation"
    )
    named = type(module).__name__.endswith("Attention")
    return from_transformers or named or isinstance(module, torch.nn.MultiheadAttention)


def _contains_another(module: torch.nn.Module, marked: dict[str, torch.nn.Module]) -> bool:
    inside = {id(child) for child in module.modules()} - {id(module)}
    return any(id(other) in inside for other in marked.values())
