"""PyTorch's CPU flash attention, through the operator that also returns the log-sum-exp.

The operator takes fewer key/value heads than query heads as they are.
"""

import torch

from ._block import AttendedBlock
from ._square import SquareKernel

# Keys the operator scores at a time (torch 2.13, aten/native/cpu/FlashAttentionKernel.cpp).
_KEY_BLOCK = 512


class CpuFlash(SquareKernel):
    """Block attention on CPU in fp64, fp32, bf16 and fp16."""

    def check_head_dim(self, head_dim: int, *, fqn: str = "attention") -> None:
        """Any head dim is taken."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None
    ) -> AttendedBlock:
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return AttendedBlock(q, k, v, output, logsumexp)

    def attend_backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *block, 0.0, causal, scale=scale
        )
        return dq, dk, dv

    def tile(self, num_queries: int) -> tuple[int, int]:
        """Return the operator's own (same source)."""
        if num_queries >= 768:
            return 256, _KEY_BLOCK
        return (64 if num_queries >= 192 else 32), _KEY_BLOCK
