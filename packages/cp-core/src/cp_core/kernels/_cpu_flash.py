"""PyTorch's CPU flash attention, through the operator that also returns the log-sum-exp.

The operator takes fewer key/value heads than query heads, and strided inputs, as they are.
"""

import torch

from ._block import AttendedBlock, Visible

# Keys the operator scores at a time (torch 2.13, aten/native/cpu/FlashAttentionKernel.cpp).
_KEY_BLOCK = 512


class CpuFlash:
    """Block attention on CPU in fp64, fp32, bf16 and fp16."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, visible: Visible, scale: float | None
    ) -> AttendedBlock:
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, visible == "causal", attn_mask=_mask(q, k, visible), scale=scale
        )
        if visible == "after_diagonal":
            logsumexp[:, :, -1] = float("-inf")
        return AttendedBlock(q, k, v, output, logsumexp)

    def backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, visible: Visible, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *block, 0.0, visible == "causal", attn_mask=_mask(block.q, block.k, visible), scale=scale
        )
        return dq, dk, dv

    def scored_entries(self, num_queries: int, num_keys: int, *, visible: Visible) -> int:
        if visible != "causal":
            return num_queries * num_keys
        rows = _query_block(num_queries)
        total = 0
        for first in range(0, num_queries, rows):
            last = min(first + rows, num_queries)
            total += (last - first) * min(-(-last // _KEY_BLOCK) * _KEY_BLOCK, num_keys)
        return total


def _mask(q: torch.Tensor, k: torch.Tensor, visible: Visible) -> torch.Tensor | None:
    if visible != "after_diagonal":
        return None
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 - (q.shape[2] - k.shape[2]))
    return torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf"))


def _query_block(num_queries: int) -> int:
    """Rows the operator takes at a time (same source)."""
    if num_queries >= 768:
        return 256
    return 64 if num_queries >= 192 else 32
