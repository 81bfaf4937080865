"""Attention written out in tensor operations: the parity kernel for a device whose fused kernels lack a dtype.

B batch, N query heads, Nkv key/value heads, G = N / Nkv, Lq queries, Lk keys, D head dim.

It holds the scores `[B, N, Lq, Lk]` and a mask `[Lq, Lk]`: for tests and for `verify`, not for training at length.
"""

import torch

from ._block import AttendedBlock, Visible, accumulation_dtype, check_block


class MathBlock:
    """Block attention on any device, in fp32 or the inputs' dtype if wider."""

    def check_head_dim(self, head_dim: int, *, fqn: str = "attention") -> None:
        """Any head dim is taken."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, visible: Visible, scale: float | None
    ) -> AttendedBlock:
        scores = _scores(q, k, visible=visible, scale=scale)
        logsumexp = scores.logsumexp(-1)
        output = _probabilities(scores, logsumexp) @ _grouped_keys(v)
        return AttendedBlock(q, k, v, output.flatten(1, 2).to(q.dtype), logsumexp.flatten(1, 2))

    def backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, visible: Visible, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, output, logsumexp = block
        num_kv_heads = k.shape[1]
        keys, values = _grouped_keys(k), _grouped_keys(v)
        queries, grads, outputs = (_grouped(tensor, num_kv_heads) for tensor in (q, grad, output))
        scores = _scores(q, k, visible=visible, scale=scale)
        probabilities = _probabilities(scores, logsumexp.unflatten(1, (num_kv_heads, -1)))
        grad_scores = probabilities * (grads @ values.mT - (grads * outputs).sum(-1, keepdim=True))
        grad_scores = grad_scores * _scale(q, scale)
        dq = (grad_scores @ keys).flatten(1, 2)
        dk, dv = (grad_scores.mT @ queries).sum(2), (probabilities.mT @ grads).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def scored_entries(self, num_queries: int, num_keys: int, *, visible: Visible) -> int:
        check_block(num_queries, num_keys, visible)
        return num_queries * num_keys


def _scores(q: torch.Tensor, k: torch.Tensor, *, visible: Visible, scale: float | None) -> torch.Tensor:
    """Return `[B, Nkv, G, Lq, Lk]`, -inf where a row does not see a key."""
    check_block(q.shape[2], k.shape[2], visible)
    scores = _grouped(q, k.shape[1]) @ _grouped_keys(k).mT * _scale(q, scale)
    if visible == "all":
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    seen = seen.tril() if visible == "causal" else seen.triu(1 - (q.shape[2] - k.shape[2]))
    return scores.masked_fill(~seen, float("-inf"))


def _probabilities(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    # A row without keys has -inf on both sides, and their difference is no number.
    return (scores - logsumexp.unsqueeze(-1)).exp().masked_fill(scores == float("-inf"), 0)


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return float(q.shape[3] ** -0.5) if scale is None else scale


def _grouped(tensor: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return `[B, N, Lq, D]` as `[B, Nkv, G, Lq, D]`, widened."""
    grouped: torch.Tensor = tensor.to(accumulation_dtype(tensor.dtype)).unflatten(1, (num_kv_heads, -1))
    return grouped


def _grouped_keys(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[B, Nkv, Lk, D]` as `[B, Nkv, 1, Lk, D]`, widened."""
    return tensor.to(accumulation_dtype(tensor.dtype)).unsqueeze(2)
