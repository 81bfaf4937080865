"""What one attention costs per rank: messages and bytes as `CollectiveTrace` counts them, products and memory.

B batch, N query heads, Nkv key/value heads, L local and S global sequence, D head dim, C ranks.
"""

from dataclasses import dataclass
from functools import singledispatch

import torch

from cp_collectives import UnsupportedError

from ._all_gather import AllGatherStrategy
from ._layout import SequenceLayout
from ._meta import AttentionShape
from .kernels import block_kernel

# Multiply and add of two matrix products forward; five products backward (FlashAttention-2, arXiv:2307.08691, 4.1).
_FORWARD_FLOPS_PER_ENTRY = 4
_BACKWARD_FLOPS_PER_ENTRY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCost:
    """Per rank, for one attention and one forward and backward."""

    forward_messages: int
    backward_messages: int
    # Bytes received from other ranks.
    forward_bytes: int
    backward_bytes: int
    # Query-key products the kernel computes, over batch and heads; masked ones that a block holds are counted.
    scored_entries: int
    # Query-key pairs that the mask lets through, over batch and heads.
    visible_entries: int
    forward_flops: int
    backward_flops: int
    # Bytes that the attention keeps from its forward to its backward.
    saved_bytes: int


@singledispatch
def attention_cost(
    strategy: object,
    *,
    shape: AttentionShape,
    layout: SequenceLayout,
    batch_size: int,
    cp_size: int,
    causal: bool = True,
) -> AttentionCost:
    """Return the cost of one attention under a strategy, for the rank that the layout describes.

    Args:
        strategy: A context-parallel strategy.
        shape: Heads and dtype of the attention.
        layout: The rank's shard.
        batch_size: B.
        cp_size: C.
        causal: Whether a query sees only earlier keys.

    Raises:
        UnsupportedError: If the cost model does not know the strategy.
    """
    raise UnsupportedError(f"the cost model does not know {type(strategy).__name__}.")


@attention_cost.register
def _all_gather_cost(
    strategy: AllGatherStrategy,
    *,
    shape: AttentionShape,
    layout: SequenceLayout,
    batch_size: int,
    cp_size: int,
    causal: bool = True,
) -> AttentionCost:
    local_elements = 2 * batch_size * shape.num_kv_heads * shape.head_dim * layout.local_length
    travelling = local_elements * (cp_size - 1) * shape.dtype.itemsize
    messages = 0 if cp_size == 1 else 1
    heads = batch_size * shape.num_q_heads
    scored = heads * _scored_entries(shape, layout, causal=causal)
    return AttentionCost(
        forward_messages=messages,
        backward_messages=messages,
        forward_bytes=travelling,
        backward_bytes=travelling,
        scored_entries=scored,
        visible_entries=heads * _visible_entries(layout, causal=causal),
        forward_flops=_FORWARD_FLOPS_PER_ENTRY * shape.head_dim * scored,
        backward_flops=_BACKWARD_FLOPS_PER_ENTRY * shape.head_dim * scored,
        saved_bytes=_saved_bytes(shape, layout, batch_size=batch_size),
    )


def _saved_bytes(shape: AttentionShape, layout: SequenceLayout, *, batch_size: int) -> int:
    """Queries, output and log-sum-exp of the local tokens, keys and values of all."""
    rows = batch_size * shape.num_q_heads * layout.local_length
    key_rows = batch_size * shape.num_kv_heads * layout.padded_length
    elements = 2 * (rows + key_rows) * shape.head_dim
    logsumexp_itemsize = torch.promote_types(shape.dtype, torch.float32).itemsize
    return elements * shape.dtype.itemsize + rows * logsumexp_itemsize


def _scored_entries(shape: AttentionShape, layout: SequenceLayout, *, causal: bool) -> int:
    kernel = block_kernel(shape.device, shape.dtype)
    if not causal:
        return kernel.scored_entries(layout.local_length, layout.global_length, visible="all")
    total = 0
    for start, stop in layout.chunks:
        length = stop - start
        total += length * start + kernel.scored_entries(length, length, visible="causal")
    return total


def _visible_entries(layout: SequenceLayout, *, causal: bool) -> int:
    if not causal:
        return layout.local_length * layout.global_length
    return sum((start + 1 + stop) * (stop - start) // 2 for start, stop in layout.chunks)
