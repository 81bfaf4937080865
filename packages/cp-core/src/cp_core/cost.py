"""What one attention costs per rank: messages and bytes as `CollectiveTrace` counts them, products and memory.

B batch, N query heads, Nkv key/value heads, L local and S global sequence, D head dim, C ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import singledispatch

from cp_collectives import UnsupportedError

from ._all_gather import AllGatherStrategy
from ._layout import SequenceLayout
from ._meta import AttentionShape
from ._query_runs import KeyBlock, QueryRun, query_runs
from .kernels import accumulation_dtype, block_kernel

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
        shape: Heads, dtype and window of the attention.
        layout: The rank's shard.
        batch_size: B.
        cp_size: C.
        causal: Whether a query sees only itself and earlier keys.

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
    per_backward = 2 if strategy.backward_kv == "regathered" else 1
    runs = query_runs(layout, causal=causal, window=shape.window)
    scored = _scored_entries(shape, runs, batch_size=batch_size)
    return AttentionCost(
        forward_messages=messages,
        backward_messages=messages * per_backward,
        forward_bytes=travelling,
        backward_bytes=travelling * per_backward,
        scored_entries=scored,
        visible_entries=_visible_entries(shape, runs, batch_size=batch_size),
        forward_flops=_FORWARD_FLOPS_PER_ENTRY * shape.head_dim * scored,
        backward_flops=_BACKWARD_FLOPS_PER_ENTRY * shape.head_dim * scored,
        saved_bytes=_saved_bytes(strategy, shape, layout, batch_size=batch_size),
    )


def _saved_bytes(strategy: AllGatherStrategy, shape: AttentionShape, layout: SequenceLayout, *, batch_size: int) -> int:
    """Queries, output and log-sum-exp of the local tokens; keys and values of all, or of the local ones."""
    rows = batch_size * shape.num_q_heads * layout.local_length
    kept_length = layout.padded_length if strategy.backward_kv == "saved" else layout.local_length
    key_rows = batch_size * shape.num_kv_heads * kept_length
    elements = 2 * (rows + key_rows) * shape.head_dim
    logsumexp_itemsize = accumulation_dtype(shape.dtype).itemsize
    return elements * shape.dtype.itemsize + rows * logsumexp_itemsize


def _scored_entries(shape: AttentionShape, runs: Iterable[QueryRun], *, batch_size: int) -> int:
    kernel = block_kernel(shape.device, shape.dtype)
    return shape.num_q_heads * sum(
        size * kernel.scored_entries(num_queries, block.stop - block.start, visible=block.visible)
        for size, num_queries, block in _blocks(runs, batch_size)
    )


def _visible_entries(shape: AttentionShape, runs: Iterable[QueryRun], *, batch_size: int) -> int:
    total = 0
    for size, num_queries, block in _blocks(runs, batch_size):
        if block.visible == "all":
            total += size * num_queries * (block.stop - block.start)
        else:  # a triangle, with its diagonal or without
            total += size * num_queries * (num_queries + (1 if block.visible == "causal" else -1)) // 2
    return shape.num_q_heads * total


def _blocks(runs: Iterable[QueryRun], batch_size: int) -> Iterator[tuple[int, int, KeyBlock]]:
    """Yield each block with its rows of the batch and its queries."""
    for run in runs:
        size = len(range(batch_size)[run.batch])
        for block in run.blocks:
            yield size, run.rows.stop - run.rows.start, block
