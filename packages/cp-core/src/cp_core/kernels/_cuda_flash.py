"""PyTorch's FlashAttention-2 on CUDA, through the operators that also return and take the log-sum-exp.

The operators take fewer key/value heads than query heads, and strided rows, as they are. Written from their sources
(torch 2.13, aten/native/transformers/cuda) and checked against their schemas and shape rules, not run on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cp_collectives import UnsupportedError

from ._block import AttendedBlock
from ._square import SquareKernel

_LARGEST_HEAD_DIM = 256
# The largest of the kernels' tiles (head dims up to 64); those of larger head dims are narrower and leave out more.
_TILE = (128, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaFlash(SquareKernel):
    """Block attention on CUDA in fp16 and bf16; head dims that are multiples of 8 up to 256."""

    # Replaced in tests, which have no GPU.
    forward_operator: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention.default
    backward_operator: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

    def check_head_dim(self, head_dim: int, *, fqn: str = "attention") -> None:
        if head_dim % 8 or head_dim > _LARGEST_HEAD_DIM:
            raise UnsupportedError(
                f"{fqn}: flash attention on CUDA needs a head dim that is a multiple of 8 and at most "
                f"{_LARGEST_HEAD_DIM}, but got {head_dim}; use torch.float32 for this model."
            )

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None
    ) -> AttendedBlock:
        output, logsumexp, *_ = self.forward_operator(q, k, v, 0.0, causal, scale=scale)
        return AttendedBlock(q, k, v, output, logsumexp)

    def attend_backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, output, logsumexp = block
        # The kernel reads the log-sum-exp as dense, whatever its strides.
        logsumexp = logsumexp.contiguous()
        lengths = (q.shape[2], k.shape[2])
        # Seed and offset of a dropout that is not there.
        random = (q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64))
        dq, dk, dv = self.backward_operator(
            grad, q, k, v, output, logsumexp, None, None, *lengths, 0.0, causal, *random, scale=scale
        )
        return dq, dk, dv

    def tile(self, num_queries: int) -> tuple[int, int]:
        """Return an upper bound of what the kernels take at once."""
        return _TILE
