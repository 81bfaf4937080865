"""PyTorch's memory-efficient attention on CUDA: the fused kernel that takes fp32.

B batch, N query heads, Nkv key/value heads, G = N / Nkv, Lq queries, Lk keys, D head dim.

Written from the operators' sources (torch 2.13, aten/native/transformers/cuda) and checked against their schemas and
shape rules, not run on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cp_collectives import UnsupportedError

from ._block import AttendedBlock, accumulation_dtype
from ._square import SquareKernel

# What an fp32 row must be a multiple of on tensor cores.
_HEAD_DIM_MULTIPLE = 4
# Rows of a log-sum-exp come, and are read in the backward, in whole groups of this many.
_LOGSUMEXP_MULTIPLE = 32
# The largest of the fp32 kernels' tiles; the others leave out more.
_TILE = (64, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaEfficient(SquareKernel):
    """Block attention on CUDA in fp32; head dims that are multiples of 4."""

    # Replaced in tests, which have no GPU.
    forward_operator: Callable[..., Any] = torch.ops.aten._scaled_dot_product_efficient_attention.default
    backward_operator: Callable[..., Any] = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

    def check_head_dim(self, head_dim: int, *, fqn: str = "attention") -> None:
        if head_dim % _HEAD_DIM_MULTIPLE:
            raise UnsupportedError(
                f"{fqn}: memory-efficient attention on CUDA needs a head dim that is a multiple of "
                f"{_HEAD_DIM_MULTIPLE} in torch.float32, but got {head_dim}; change the model's head dim."
            )

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None
    ) -> AttendedBlock:
        num_heads = q.shape[1]
        output, logsumexp, *_ = self.forward_operator(
            q, _expanded(k, num_heads), _expanded(v, num_heads), None, True, 0.0, causal, scale=scale
        )
        return AttendedBlock(q, k, v, output, logsumexp[:, :, : q.shape[2]])

    def attend_backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, output, logsumexp = block
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        # The kernel reads rows of the output N * D apart, whatever its strides.
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        keys = (_expanded(k, num_heads), _expanded(v, num_heads))
        # Seed and offset of a dropout that is not there.
        random = (q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64))
        wanted = [True, True, True, False]
        dq, dk, dv, _ = self.backward_operator(
            grad, q, *keys, None, output, _padded(logsumexp), *random, 0.0, wanted, causal, scale=scale
        )
        return dq, _summed(dk, num_kv_heads), _summed(dv, num_kv_heads)

    def tile(self, num_queries: int) -> tuple[int, int]:
        """Return an upper bound of what the kernels take at once."""
        return _TILE


def _expanded(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat each of the heads of `[B, Nkv, Lk, D]` for its G query heads."""
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1) if tensor.shape[1] != num_heads else tensor


def _summed(grad: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Sum the gradients `[B, N, Lk, D]` of each key/value head's copies."""
    if grad.shape[1] == num_kv_heads:
        return grad
    grouped: torch.Tensor = grad.unflatten(1, (num_kv_heads, -1))
    return grouped.sum(2, dtype=accumulation_dtype(grad.dtype)).to(grad.dtype)


def _padded(logsumexp: torch.Tensor) -> torch.Tensor:
    """Pad `[B, N, Lq]` as the forward kernel does: +inf gives the rows that are not there the probability 0."""
    missing = -logsumexp.shape[2] % _LOGSUMEXP_MULTIPLE
    return torch.nn.functional.pad(logsumexp, (0, missing), value=float("inf")).contiguous()
