"""What every block kernel computes, whatever the device.

B batch, N query heads, Nkv key/value heads, Lq queries, Lk keys, D head dim.
"""

from typing import Literal, NamedTuple, Protocol

import torch

# Which keys a row of a block sees:
#   "all"             every key
#   "causal"          square block: row r sees columns c <= r
#   "after_diagonal"  upper edge of a sliding window; square, or with the first d = Lq - Lk of its columns cut off: row
#                     r sees columns c with c + d > r. The last row sees none: output 0, log-sum-exp -inf, no gradient.
Visible = Literal["all", "causal", "after_diagonal"]


class AttendedBlock(NamedTuple):
    """One block of queries and keys with the result that the backward needs.

    The output and its log-sum-exp may be those of a merge that this block is part of.
    """

    q: torch.Tensor  # [B, N, Lq, D]
    k: torch.Tensor  # [B, Nkv, Lk, D], N a multiple of Nkv
    v: torch.Tensor  # [B, Nkv, Lk, D]
    output: torch.Tensor  # [B, N, Lq, D]
    logsumexp: torch.Tensor  # [B, N, Lq], natural logarithm of the summed exponentials of the scores, fp32 or wider


class BlockKernel(Protocol):
    """Attention that also gives the log-sum-exp of its scores, so that blocks of keys can be merged.

    Inputs may be strided. Keys and values come with their own, fewer heads; what a device needs expanded, its kernel
    expands, and sums the gradients back.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, visible: Visible, scale: float | None
    ) -> AttendedBlock:
        """Compute attention of queries `[B, N, Lq, D]` over keys and values `[B, Nkv, Lk, D]`.

        Args:
            q, k, v: On the kernel's device, of a dtype that it was chosen for.
            visible: Which keys each row sees; the block has at least one key.
            scale: Multiplies the scores; None is 1 / sqrt(D).

        Raises:
            UnsupportedError: If the device's operator does not take the head dim.
        """
        ...

    def backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, visible: Visible, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dQ, dK, dV of this block, in the inputs' dtype and shapes.

        With the merged output and log-sum-exp in `block`, and `grad` the gradient of the merged output, this is the
        block's exact share: the probabilities are exp(score - logsumexp), whoever computed the log-sum-exp.
        """
        ...

    def scored_entries(self, num_queries: int, num_keys: int, *, visible: Visible) -> int:
        """Return how many query-key products the kernel computes per head, masked ones included."""
        ...

    def check_head_dim(self, head_dim: int, *, fqn: str = "attention") -> None:
        """Refuse a head dim, before the first forward as well as in it.

        Args:
            head_dim: D.
            fqn: Fully qualified name of the module that has it, for the error.

        Raises:
            UnsupportedError: If the device's operator does not take it, naming what it takes.
        """
        ...


def check_block(num_queries: int, num_keys: int, visible: Visible) -> None:
    """Raise for a block that no caller may form; operators would read it as another one, and say nothing."""
    fits = {
        "all": num_keys >= 1,
        "causal": num_keys == num_queries >= 1,
        "after_diagonal": num_queries >= num_keys >= 1,
    }
    if not fits.get(visible, False):
        raise AssertionError(f"no block kernel has visible={visible!r} with {num_queries} queries and {num_keys} keys.")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what log-sum-exps and sums of partial results are kept in: fp32, or the inputs' dtype if wider."""
    return torch.promote_types(dtype, torch.float32)
