"""All three kinds of block from a device that knows two: every key, and a square block that is causal.

The block after the diagonal needs neither a mask tensor nor a window. Its first d = Lq - Lk rows see every key, its
last row sees none, and what lies between is square: row i of it sees columns c >= i, a causal block read backwards.
For Lq = 5, Lk = 4, d = 1:

           keys 0123              rows 3, 2, 1 over keys 3, 2, 1:
    query 0     xxxx   all
    query 1      xxx   square         query 3     x
    query 2       xx                  query 2     xx
    query 3        x                  query 1     xxx
    query 4            none

Rectangular causal masks are not used at all: devices align them differently.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from ._block import AttendedBlock, Visible, accumulation_dtype, check_block


class SquareKernel(ABC):
    """What a device has to bring: `attend`, `attend_backward`, `tile`, `check_head_dim`.

    NPU: `attend` is `npu_fusion_attention` in layout BNSD (fewer key/value heads as they are), `atten_mask=None`, or
    the 2048 x 2048 upper triangle with `sparse_mode=2` for a causal block. Its log-sum-exp is
    `softmax_max[..., 0] + log(softmax_sum[..., 0])`, fp32. `attend_backward` is `npu_fusion_attention_grad`, which
    wants that pair back, 8 copies of each: the merged log-sum-exp as `softmax_max`, ones as `softmax_sum`.
    """

    @abstractmethod
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None
    ) -> AttendedBlock:
        """Compute one block; `causal` only where it is square. The last dim of q, k and v has stride 1."""

    @abstractmethod
    def attend_backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, causal: bool, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dQ, dK, dV. The last dim of the block's q, k, v and output has stride 1; `grad` has any strides."""

    @abstractmethod
    def tile(self, num_queries: int) -> tuple[int, int]:
        """Return how many queries by how many keys are scored at once; only whole tiles are left out of a block."""

    @abstractmethod
    def check_head_dim(self, head_dim: int, *, fqn: str = "attention") -> None:
        """See `BlockKernel.check_head_dim`."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, visible: Visible, scale: float | None
    ) -> AttendedBlock:
        check_block(q.shape[2], k.shape[2], visible)
        self.check_head_dim(q.shape[3])
        q, k, v = (_rowwise(tensor) for tensor in (q, k, v))
        if visible == "after_diagonal":
            return self._after_diagonal(q, k, v, scale=scale)
        return self.attend(q, k, v, causal=visible == "causal", scale=scale)

    def backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, visible: Visible, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        check_block(block.q.shape[2], block.k.shape[2], visible)
        q, k, v, output = (_rowwise(tensor) for tensor in block[:4])
        block = AttendedBlock(q, k, v, output, block.logsumexp)
        if visible == "after_diagonal":
            return self._after_diagonal_backward(grad, block, scale=scale)
        return self.attend_backward(grad, block, causal=visible == "causal", scale=scale)

    def scored_entries(self, num_queries: int, num_keys: int, *, visible: Visible) -> int:
        check_block(num_queries, num_keys, visible)
        if visible == "all":
            return num_queries * num_keys
        if visible == "causal":
            return self._causal_entries(num_queries)
        return (num_queries - num_keys) * num_keys + self._causal_entries(num_keys - 1)

    def _causal_entries(self, length: int) -> int:
        rows, columns = self.tile(length)
        total = 0
        for first in range(0, length, rows):
            last = min(first + rows, length)
            total += (last - first) * min(-(-last // columns) * columns, length)
        return total

    def _after_diagonal(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None
    ) -> AttendedBlock:
        output = q.new_zeros(q.shape)
        logsumexp = q.new_full(q.shape[:3], float("-inf"), dtype=accumulation_dtype(q.dtype))
        for part in _parts(q.shape[2], k.shape[2]):
            found = self.attend(part.of_rows(q), part.of_keys(k), part.of_keys(v), causal=part.causal, scale=scale)
            output[:, :, part.rows] = part.turned(found.output)
            logsumexp[:, :, part.rows] = part.turned(found.logsumexp)
        return AttendedBlock(q, k, v, output, logsumexp)

    def _after_diagonal_backward(
        self, grad: torch.Tensor, block: AttendedBlock, *, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, output, logsumexp = block
        wide = accumulation_dtype(q.dtype)
        dq, dk, dv = (tensor.new_zeros(tensor.shape, dtype=wide) for tensor in (q, k, v))
        for part in _parts(q.shape[2], k.shape[2]):
            piece = AttendedBlock(
                part.of_rows(q), part.of_keys(k), part.of_keys(v), part.of_rows(output), part.of_rows(logsumexp)
            )
            found = self.attend_backward(part.of_rows(grad), piece, causal=part.causal, scale=scale)
            for total, share, span in zip((dq, dk, dv), found, (part.rows, part.keys, part.keys), strict=True):
                total[:, :, span] += part.turned(share)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Part(NamedTuple):
    """Some rows and keys of a block after the diagonal, which are attended as one block."""

    rows: slice
    keys: slice
    # Read backwards and causal, or else every key.
    causal: bool

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.turned(tensor[:, :, self.rows])

    def of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.turned(tensor[:, :, self.keys])

    def turned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(2) if self.causal else tensor


def _parts(num_queries: int, num_keys: int) -> list[_Part]:
    """Return the parts that have rows; the last row has no key and no part."""
    shift = num_queries - num_keys
    parts = [
        _Part(slice(0, shift), slice(0, num_keys), causal=False),
        _Part(slice(shift, num_queries - 1), slice(1, num_keys), causal=True),
    ]
    return [part for part in parts if part.rows.start < part.rows.stop]


def _rowwise(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with stride 1 in its last dim; the CPU operator reads any other as if it had it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
