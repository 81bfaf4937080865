"""Calls of `F.scaled_dot_product_attention` inside a module's forward: taken in this thread, for as long as it runs.

B batch, N query heads, Nkv key/value heads, L queries, S keys, D head dim.

A `TorchFunctionMode` and not a patched function: other models and threads keep torch's own. Whoever takes a call runs
outside the mode, so what a kernel calls in its turn is not taken again. Recomputation for backward runs the forward
again and with it the mode.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from cp_core import AttentionMeta, InvalidInputError, SequenceLayout, UnsupportedError

# The function of torch.nn.functional is that of torch._C._nn.
_TAKEN = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


class SdpaCall(NamedTuple):
    """The arguments of one call, under torch's own names and defaults."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def meta(self, layout: SequenceLayout) -> AttentionMeta:
        """Describe the attention that is asked for, over the sequence of a layout."""
        return AttentionMeta(layout=layout, causal=self.is_causal, scale=self.scale, dropout_p=self.dropout_p)


class SdpaCalls(TorchFunctionMode):
    """While active, hands each call to `take`, whose result the caller gets."""

    def __init__(self, take: Callable[[SdpaCall], torch.Tensor]) -> None:
        super().__init__()
        self._take = take

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(func is taken for taken in _TAKEN):
            call = SdpaCall(*args, **(kwargs or {}))
            query, key, value = map(_as_autocast, call[:3])
            return self._take(call._replace(query=query, key=key, value=value))
        return func(*args, **(kwargs or {}))


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast as autocast does for torch's own function."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def require_supported(call: SdpaCall, name: str) -> None:
    """Refuse what torch would, and what no context-parallel method could compute from a local shard.

    Raises:
        ContextParallelError: Naming the module and what was found.
    """
    if call.attn_mask is not None:
        raise InvalidInputError(
            f"{name}: scaled_dot_product_attention was given an attn_mask {tuple(call.attn_mask.shape)}; a mask made "
            "from this rank's shard cannot be right, so ask for causality by is_causal=True and give padding to "
            "shard_batch_for_cp as the attention_mask of the global batch."
        )
    query, key, value = tensors = call[:3]
    found = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
    if any(tensor.ndim != 4 for tensor in tensors):
        raise UnsupportedError(
            f"{name}: scaled_dot_product_attention takes query, key and value as [B, N, L, D] under context "
            f"parallelism, but got {found}; give them four dimensions."
        )
    if key.shape != value.shape or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        raise UnsupportedError(
            f"{name}: under context parallelism key and value have one shape, and the query's batch and head dim, but "
            f"scaled_dot_product_attention got {found}."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise InvalidInputError(
            f"{name}: scaled_dot_product_attention needs query, key and value of one dtype, but got {found}."
        )
    num_q_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_kv_heads not in (1, num_q_heads) and (not call.enable_gqa or num_q_heads % num_kv_heads):
        raise InvalidInputError(
            f"{name}: {num_q_heads} query heads cannot share {num_kv_heads} key/value heads with enable_gqa="
            f"{call.enable_gqa}; give enable_gqa=True and a number of query heads that is a multiple."
        )
