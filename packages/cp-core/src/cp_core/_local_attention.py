"""Local queries against gathered keys, without a mask tensor and without scoring keys that no query sees.

B batch, N query heads, K key/value heads, L local queries, S gathered keys, D head dim.

A chunk of queries at global positions a..b-1 sees keys 0..a-1 in full and its own a..b-1 causally. Both blocks run in
the plain kernel and are merged by their log-sum-exp (the online softmax of FlashAttention, arXiv:2205.14135); the
backward of each block with the merged output and log-sum-exp gives its exact share of the gradients (as in Ring
Attention, arXiv:2310.01889). For a = 4, b = 8:

           keys 0123 4567 ...
    query 4     xxxx x...          prefix: one full block      keys from b on: never touched
    query 5     xxxx xx..          diagonal: one causal block
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ._layout import Chunk
from ._meta import AttentionMeta
from .kernels import AttendedBlock, BlockKernel, Visible, block_kernel


def local_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: AttentionMeta
) -> torch.Tensor:
    """Compute attention of this rank's queries over the global sequence.

    Args:
        q: Local queries `[B, N, L, D]`, in the layout's order.
        k, v: Global keys and values `[B, K, S, D]` in global order, S the padded length. N is a multiple of K.
        attention_meta: Layout, causality and scale; the caller has refused what is not supported.

    Returns:
        `[B, N, L, D]`, of the inputs' dtype.

    Raises:
        UnsupportedError: If there is no kernel for the device and dtype, or it does not take the head dim.
    """
    output: torch.Tensor
    if attention_meta.causal:
        output = _CausalAttention.apply(q, k, v, attention_meta)
    else:  # pads stand at the end, so the real keys are a prefix
        real = slice(0, attention_meta.layout.global_length)
        output = _FullAttention.apply(q, k[:, :, real], v[:, :, real], attention_meta)
    return output


class _FullAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        block = block_kernel(q.device, q.dtype).forward(q, k, v, visible="all", scale=meta.scale)
        ctx.save_for_backward(*block)
        ctx.scale = meta.scale
        return block.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        block = AttendedBlock(*ctx.saved_tensors)
        kernel = block_kernel(block.q.device, block.q.dtype)
        return *kernel.backward(grad, block, visible="all", scale=ctx.scale), None


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        kernel = block_kernel(q.device, q.dtype)
        chunks = meta.layout.chunks
        pieces = [_attend(kernel, q[:, :, rows], (k, v), chunk, scale=meta.scale) for rows, chunk in _rows_of(chunks)]
        output, logsumexp = (_join(list(parts)) for parts in zip(*pieces, strict=True))
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.chunks, ctx.scale = chunks, meta.scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        kernel = block_kernel(q.device, q.dtype)
        into = (torch.zeros_like(k), torch.zeros_like(v))
        query_grads = []
        for rows, chunk in _rows_of(ctx.chunks):
            block = AttendedBlock(q[:, :, rows], k, v, output[:, :, rows], logsumexp[:, :, rows])
            query_grads.append(_attend_backward(kernel, grad[:, :, rows], block, chunk, scale=ctx.scale, into=into))
        return _join(query_grads), *into, None


def _attend(
    kernel: BlockKernel,
    q: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    chunk: Chunk,
    *,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of one chunk: its diagonal block, merged with its prefix where it has one."""
    start, stop = chunk
    own_k, own_v = (tensor[:, :, start:stop] for tensor in keys)
    diagonal = kernel.forward(q, own_k, own_v, visible="causal", scale=scale)
    if start == 0:
        return diagonal.output, diagonal.logsumexp
    earlier_k, earlier_v = (tensor[:, :, :start] for tensor in keys)
    prefix = kernel.forward(q, earlier_k, earlier_v, visible="all", scale=scale)
    return _merge(prefix, diagonal)


def _attend_backward(
    kernel: BlockKernel,
    grad: torch.Tensor,
    block: AttendedBlock,
    chunk: Chunk,
    *,
    scale: float | None,
    into: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return dQ of one chunk and add its dK and dV `into` those of the whole sequence."""
    start, stop = chunk
    query_grad = None
    spans: tuple[tuple[int, int, Visible], ...] = ((start, stop, "causal"), (0, start, "all"))
    for first, last, visible in spans:
        if first == last:
            continue
        part = block._replace(k=block.k[:, :, first:last], v=block.v[:, :, first:last])
        dq, dk, dv = kernel.backward(grad, part, visible=visible, scale=scale)
        into[0][:, :, first:last] += dk
        into[1][:, :, first:last] += dv
        query_grad = _wide(dq) if query_grad is None else query_grad + _wide(dq)
    if query_grad is None:
        raise AssertionError(f"chunk {chunk} holds no positions.")
    return query_grad.to(grad.dtype)


def _merge(left: AttendedBlock, right: AttendedBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two blocks of keys seen by the same queries, in fp32 or wider."""
    logsumexp = torch.logaddexp(left.logsumexp, right.logsumexp)
    merged = _wide(left.output) * (left.logsumexp - logsumexp).exp().unsqueeze(-1)
    merged += _wide(right.output) * (right.logsumexp - logsumexp).exp().unsqueeze(-1)
    return merged.to(left.output.dtype), logsumexp


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _rows_of(chunks: tuple[Chunk, ...]) -> Iterator[tuple[slice, Chunk]]:
    """Yield each chunk with the local rows that hold it."""
    first = 0
    for chunk in chunks:
        rows = slice(first, first + chunk.stop - chunk.start)
        first = rows.stop
        yield rows, chunk


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
