"""Finding the attention modules of a model."""

import re
from fnmatch import fnmatchcase
from typing import Any

import torch

from cp_core import AttentionShape, InvalidInputError, UnsupportedError

from ._model_spec import model_spec

# Families without a convolution of torch's, or whose name is the better one to show.
_RECURRENT_NAMES = re.compile(
    r"DeltaNet|Mamba\d*Mixer|ShortConv|LightningAttention|LinearAttention|Rwkv|Recurrent\w*Block|SSM"
)


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


def unserved_token_mixers(model: torch.nn.Module, boundaries: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the modules outside the boundaries that mix tokens along the sequence: convolutions and recurrences.

    No method serves them: on each rank they would start from nothing in the middle of the sequence.
    """
    served = {id(inner) for boundary in boundaries.values() for inner in boundary.modules()}
    found = {name: m for name, m in model.named_modules() if id(m) not in served and _mixes_tokens(m)}
    return {name: m for name, m in found.items() if not any(name.startswith(f"{outer}.") for outer in found)}


def _mixes_tokens(module: torch.nn.Module) -> bool:
    by_kind = isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d | torch.nn.RNNBase)
    return by_kind or _RECURRENT_NAMES.search(type(module).__name__) is not None


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
            f"{fqn} ({type(module).__name__}) lacks num_attention_heads in its config, a head_dim, or parameters; this "
            "version wraps attention modules of transformers that have all of them."
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
