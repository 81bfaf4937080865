"""Local queries against gathered keys, without a mask tensor and without scoring keys that no query sees.

B batch, N query heads, K key/value heads, L local queries, S gathered keys, D head dim.

Each run of queries (`_query_runs`) sees a few blocks of keys. The blocks go through the plain kernel one by one and are
merged by their log-sum-exp (the online softmax of FlashAttention, arXiv:2205.14135); the backward of each block with
the merged output and log-sum-exp gives its exact share of the gradients (as in Ring Attention, arXiv:2310.01889).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ._meta import AttentionMeta
from ._query_runs import KeyBlock, QueryRun, query_runs
from .kernels import AttendedBlock, BlockKernel, accumulation_dtype, block_kernel

Gather = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class KeyValueRecall(NamedTuple):
    """How keys and values are had again in backward."""

    # This rank's, `[B, K, L, D]` each; autograd keeps them, and sees if they are changed in place.
    k: torch.Tensor
    v: torch.Tensor
    # Makes the global ones `[B, K, S, D]` of them, without a graph.
    gather: Gather


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attention_meta: AttentionMeta,
    recall: KeyValueRecall | None = None,
) -> torch.Tensor:
    """Compute attention of this rank's queries over the global sequence.

    Args:
        q: Local queries `[B, N, L, D]`, in the layout's order.
        k, v: Global keys and values `[B, K, S, D]` in global order, S the padded length. N is a multiple of K.
        attention_meta: Layout, causality, scale, window and sinks; the caller has refused what is not supported.
        recall: Gives `k` and `v` again in backward, so that they need not be kept; None keeps them.

    Returns:
        `[B, N, L, D]`, of the inputs' dtype; 0 for pads.

    Raises:
        UnsupportedError: If there is no kernel for device and dtype, or it does not take the head dim.
    """
    attention = _Attention(
        kernel=block_kernel(q.device, q.dtype),
        runs=query_runs(attention_meta.layout, causal=attention_meta.causal, window=attention_meta.window),
        scale=attention_meta.scale,
        gather=None if recall is None else recall.gather,
        has_sinks=attention_meta.sinks is not None,
    )
    local = [] if recall is None else [recall.k, recall.v]
    others = local if attention_meta.sinks is None else [*local, attention_meta.sinks]
    output: torch.Tensor = _LocalAttention.apply(attention, q, k, v, *others)
    return output


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attention:
    """What forward and backward of one attention share beside tensors."""

    kernel: BlockKernel
    runs: tuple[QueryRun, ...]
    scale: float | None
    # Makes global keys and values of local ones; None where the global ones are kept.
    gather: Gather | None
    has_sinks: bool


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attention: _Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        output, logsumexp = _attend(attention, q, k, v)
        if attention.has_sinks:
            output, logsumexp = _with_sinks(output, logsumexp, others[-1])
        keys = (k, v) if attention.gather is None else others[:2]
        ctx.save_for_backward(q, *keys, output, logsumexp, *(others[-1:] if attention.has_sinks else ()))
        ctx.attention, ctx.num_others = attention, len(others)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        attention: _Attention = ctx.attention
        q, k, v, output, logsumexp, *sinks = ctx.saved_tensors
        if attention.gather is not None:
            k, v = attention.gather(k, v)
        gradients = _attend_backward(attention, grad, AttendedBlock(q, k, v, output, logsumexp))
        sink_gradients = [_sink_gradient(grad, output, logsumexp, sink) for sink in sinks]
        return None, *gradients, *[None] * (ctx.num_others - len(sinks)), *sink_gradients


def _attend(
    attention: _Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of all local queries; 0 for pads, which are in no run."""
    pieces = [_attend_run(attention, q, k, v, run) for run in attention.runs]
    if len(pieces) == 1 and pieces[0][0].shape == q.shape:
        return pieces[0]
    output = q.new_zeros(q.shape)
    logsumexp = q.new_zeros(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    for run, (piece, piece_logsumexp) in zip(attention.runs, pieces, strict=True):
        output[run.batch, :, run.rows] = piece
        logsumexp[run.batch, :, run.rows] = piece_logsumexp
    return output, logsumexp


def _attend_run(
    attention: _Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: QueryRun
) -> tuple[torch.Tensor, torch.Tensor]:
    queries = q[run.batch, :, run.rows]
    attended = [
        attention.kernel.forward(
            queries, _keys(k, run, block), _keys(v, run, block), visible=block.visible, scale=attention.scale
        )
        for block in run.blocks
    ]
    return _merged(attended)


def _merged(blocks: list[AttendedBlock]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge blocks of keys that the same queries see, in fp32 or wider."""
    first = blocks[0]
    if len(blocks) == 1:
        return first.output, first.logsumexp
    logsumexp = torch.stack([block.logsumexp for block in blocks]).logsumexp(0)
    output = torch.zeros_like(first.output, dtype=accumulation_dtype(first.output.dtype))
    for block in blocks:
        output.addcmul_(block.output, (block.logsumexp - logsumexp).exp().unsqueeze(-1))
    return output.to(first.output.dtype), logsumexp


def _attend_backward(
    attention: _Attention, grad: torch.Tensor, whole: AttendedBlock
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dQ, dK and dV of all runs."""
    dq = torch.zeros_like(whole.q)
    dtype = (
        accumulation_dtype(whole.k.dtype) if _overlap(attention.runs) else whole.k.dtype
    )  # added up in 16 bit they lose bits
    dk, dv = (torch.zeros_like(keys, dtype=dtype) for keys in (whole.k, whole.v))
    for run in attention.runs:
        queries = (run.batch, slice(None), run.rows)
        own = whole._replace(q=whole.q[queries], output=whole.output[queries], logsumexp=whole.logsumexp[queries])
        dq[queries] = _attend_run_backward(attention, grad[queries], own, run, into=(dk, dv))
    return dq, dk.to(whole.k.dtype), dv.to(whole.v.dtype)


def _attend_run_backward(
    attention: _Attention,
    grad: torch.Tensor,
    whole: AttendedBlock,
    run: QueryRun,
    *,
    into: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return dQ of one run, in fp32 or wider, and add its dK and dV `into` those of the whole sequence."""
    query_gradient = torch.zeros_like(whole.q, dtype=accumulation_dtype(whole.q.dtype))
    for block in run.blocks:
        part = whole._replace(k=_keys(whole.k, run, block), v=_keys(whole.v, run, block))
        dq, dk, dv = attention.kernel.backward(grad, part, visible=block.visible, scale=attention.scale)
        query_gradient += dq
        for total, share in zip(into, (dk, dv), strict=True):
            _keys(total, run, block).add_(share)
    return query_gradient


def _overlap(runs: tuple[QueryRun, ...]) -> bool:
    """Whether some keys are seen by several runs of one row."""
    rows = [(run.batch.start, run.batch.stop) for run in runs]
    return len(set(rows)) < len(rows)


def _keys(tensor: torch.Tensor, run: QueryRun, block: KeyBlock) -> torch.Tensor:
    return tensor[run.batch, :, block.start : block.stop]


def _with_sinks(
    output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let one more logit per head `[N]` take part in the softmax, without a value."""
    total = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
    return (output * (logsumexp - total).exp().unsqueeze(-1)).to(output.dtype), total


def _sink_gradient(
    grad: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    share = (sinks.to(logsumexp.dtype)[:, None] - logsumexp).exp()  # of each softmax that went to the sink
    return -(share * (grad.to(share.dtype) * output).sum(-1)).sum((0, 2)).to(sinks.dtype)
