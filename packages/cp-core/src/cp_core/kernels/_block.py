"""What every block kernel computes, whatever the device."""

from typing import Literal, NamedTuple, Protocol

import torch

Visible = Literal["all", "causal", "after_diagonal"]


class AttendedBlock(NamedTuple):
    """One block of queries and keys with the result that the backward needs.

    The output and its log-sum-exp may be those of a merge that this block is part of.
    """

    q: torch.Tensor  # [B, N, Lq, D]
    k: torch.Tensor  # [B, Nkv, Lk, D], N a multiple of Nkv
    v: torch.Tensor  # [B, Nkv, Lk, D]
    output: torch.Tensor  # [B, N, Lq, D]
    logsumexp: torch.Tensor  # [B, N, Lq], fp32 or wider


class BlockKernel(Protocol):
    """Unmasked or square-causal attention that also gives the log-sum-exp of its scores, so that blocks can be merged.

    `causal` needs as many queries as keys.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, visible: Visible, scale: float | None
    ) -> AttendedBlock:
        """Compute attention of queries `[B, N, Lq, D]` over keys and values `[B, Nkv, Lk, D]`."""
        ...

    def backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, visible: Visible, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dQ, dK, dV of this block for the gradient of its output."""
        ...

    def scored_entries(self, num_queries: int, num_keys: int, *, visible: Visible) -> int:
        """Return how many query-key products the kernel computes per head, masked ones included."""
        ...
