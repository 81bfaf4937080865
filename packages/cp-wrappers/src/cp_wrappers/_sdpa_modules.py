"""Which modules the `sdpa_*` wrappers serve, told before the first forward, and what is known of their heads."""

import inspect
from collections.abc import Sequence
from typing import Any, get_args

import torch

from cp_core import AttentionShape, InvalidInputError, UnsupportedError

from ._attention_settings import asks_config_for_attention, refuse_unsupported
from ._boundaries import attention_shape
from ._forward_code import calls_sdpa
from ._sdpa_forwards import Heads, Layout


def check_hf(module: torch.nn.Module, fqn: str, *, backward_kv: str = "saved", **data: Any) -> None:
    del backward_kv  # of any module
    heads = declared_heads(fqn, **data)
    if not asks_config_for_attention(module):
        _require_own_call(module, fqn, "sdpa_hf")
        return
    if heads is not None:
        raise InvalidInputError(f"{fqn}: its heads are those of its transformers config; leave num_q_heads out.")
    refuse_unsupported(module, fqn)


def check_qkv(
    module: torch.nn.Module,
    fqn: str,
    *,
    layout: Layout = "BNSD",
    arguments: Sequence[str] | None = None,
    **data: Any,
) -> None:
    declared_heads(fqn, **data)
    if layout not in get_args(Layout):
        raise InvalidInputError(f"{fqn}: layout of sdpa_qkv must be BNSD or BSND, but is {layout!r}.")
    _require_own_call(module, fqn, "sdpa_qkv")
    qkv_names(module, fqn, arguments)


def _require_own_call(module: torch.nn.Module, fqn: str, wrapper: str) -> None:
    """Refuse a module in which no attention call would be seen; the forward itself is watched for exactly one."""
    kind = type(module)
    if asks_config_for_attention(module) or kind.__module__.startswith("transformers."):
        raise UnsupportedError(
            f"{fqn} ({kind.__name__}) is a module of transformers, which are served by sdpa_hf, and only where their "
            "config names the attention implementation."
        )
    if not any(calls_sdpa(inner) for inner in module.modules()):
        raise UnsupportedError(
            f"{fqn} ({kind.__name__}) shows no attention call that {wrapper} could take part in: neither its forward, "
            "nor what that calls, nor a module in it calls torch.nn.functional.scaled_dot_product_attention; give it a "
            "wrapper of its own."
        )


def qkv_names(module: torch.nn.Module, fqn: str, arguments: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of a forward's queries, keys and values: those declared, else its first three."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = f"{fqn} ({type(module).__name__}): its forward takes {', '.join(map(str, parameters)) or 'nothing'}"
    if arguments is not None:
        names = tuple(arguments)
        if len(set(names)) != 3 or not set(names) <= {p.name for p in named}:
            raise InvalidInputError(
                f"{takes}; arguments of sdpa_qkv must name three of these, its q, k and v, but is {list(names)}."
            )
        return names
    first = [p.name for p in named[:3] if p.kind is not p.KEYWORD_ONLY and p.default is p.empty]
    if len(first) != 3:
        raise UnsupportedError(
            f"{takes}, and sdpa_qkv serves forward(q, k, v, ...); use sdpa_hf, or name its q, k and v as arguments."
        )
    return tuple(first)


def declared_heads(
    fqn: str, *, num_q_heads: int | None = None, num_kv_heads: int | None = None, head_dim: int | None = None
) -> Heads | None:
    if num_q_heads is num_kv_heads is head_dim is None:
        return None
    if not (isinstance(num_q_heads, int) and isinstance(num_kv_heads, int) and isinstance(head_dim, int)):
        raise InvalidInputError(
            f"{fqn}: num_q_heads, num_kv_heads and head_dim are declared together, as integers, but are "
            f"{num_q_heads!r}, {num_kv_heads!r} and {head_dim!r}."
        )
    return Heads(num_q_heads, num_kv_heads, head_dim)


def hf_shape(
    module: torch.nn.Module, fqn: str, *, device: torch.device | None, backward_kv: str = "saved", **data: Any
) -> AttentionShape | None:
    del backward_kv
    if asks_config_for_attention(module):
        return attention_shape(module, fqn, device=device)
    return declared_shape(module, fqn, device=device, **data)


def declared_shape(
    module: torch.nn.Module,
    fqn: str,
    *,
    device: torch.device | None,
    layout: Layout = "BNSD",
    arguments: Sequence[str] | None = None,
    **data: Any,
) -> AttentionShape | None:
    """Return declared heads as a shape; None where there are none, or no parameter says what they are computed in."""
    heads, parameter = declared_heads(fqn, **data), next(module.parameters(), None)
    if heads is None or parameter is None:
        return None
    return AttentionShape(**heads._asdict(), dtype=parameter.dtype, device=device or parameter.device, fqn=fqn)
