"""Several tensors in one message: rows are sequence positions, columns are everything else.

L local sequence, S = C * L gathered sequence, W columns of all tensors together.

With the sequence first, the ranks' buffers of a gather lie in sequence order as they arrive: what comes back is a view
for each tensor, and no copy. K and V of one layer, `[B, N, L, D]` each, with B = N = 1 and D = 2:

    K [k0 k0']  V [v0 v0']        row 0   k0 k0' v0 v0'
      [k1 k1']    [v1 v1']   ->   row 1   k1 k1' v1 v1'      W = 4
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ._errors import InvalidInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePacking:
    """How tensors that share a sequence length lie in the columns of one `[L, W]` buffer."""

    # Per tensor: where its sequence dim stands, and the sizes of all its other dims.
    dims: tuple[int, ...]
    row_shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], dim: int) -> "SequencePacking":
        """Describe `tensors`, whose sequence is `dim`, after checking that one message can hold them."""
        _validate(tensors, dim)
        dims = tuple(dim % tensor.ndim for tensor in tensors)
        row_shapes = tuple((*t.shape[:d], *t.shape[d + 1 :]) for t, d in zip(tensors, dims, strict=True))
        return cls(dims=dims, row_shapes=row_shapes)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each tensor."""
        return tuple(math.prod(shape) for shape in self.row_shapes)

    def select(self, mask: Sequence[bool]) -> "SequencePacking":
        """Return the packing of the tensors that `mask` marks."""
        return SequencePacking(
            dims=tuple(dim for dim, keep in zip(self.dims, mask, strict=True) if keep),
            row_shapes=tuple(shape for shape, keep in zip(self.row_shapes, mask, strict=True) if keep),
        )

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy the tensors into one contiguous `[rows, W]` buffer; one copy, none where one tensor lies so already."""
        rows = [tensor.movedim(dim, 0) for tensor, dim in zip(tensors, self.dims, strict=True)]
        if len(rows) == 1 and rows[0].is_contiguous():
            return rows[0].reshape(rows[0].shape[0], -1)
        buffer = rows[0].new_empty(rows[0].shape[0], sum(self.widths))
        for slot, row in zip(self._slots(buffer), rows, strict=True):
            slot.copy_(row)
        return buffer

    def unpack(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each tensor as a view of a `[rows, W]` buffer, its sequence dim back in place."""
        slots = self._slots(buffer)
        return tuple(slot.movedim(0, dim) for slot, dim in zip(slots, self.dims, strict=True))

    def _slots(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        columns = buffer.split(self.widths, dim=1)
        return [part.view(part.shape[0], *shape) for part, shape in zip(columns, self.row_shapes, strict=True)]


def _validate(tensors: Sequence[torch.Tensor], dim: int) -> None:
    if not tensors:
        raise InvalidInputError("a collective needs at least one tensor, but got none.")
    first = tensors[0]
    for tensor in tensors:
        if not -tensor.ndim <= dim < tensor.ndim:
            raise InvalidInputError(f"dim {dim} is not a dim of a tensor of shape {tuple(tensor.shape)}.")
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise InvalidInputError(
                f"tensors of one message must share dtype and device, but got {first.dtype} on {first.device} and "
                f"{tensor.dtype} on {tensor.device}; cast before the collective."
            )
        if tensor.shape[dim] != first.shape[dim]:
            raise InvalidInputError(
                f"tensors of one message must have equal length in dim {dim}, but got {first.shape[dim]} and "
                f"{tensor.shape[dim]}."
            )
