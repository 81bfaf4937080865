"""The bytes of a tensor: which other tensors share them, whether they changed, and what marks them as not there yet.

All of it goes unseen by dispatch modes; what it writes counts for autograd as a write to the tensor.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from cp_collectives.testing._npu_stand_in import NpuStandInTensor

if TYPE_CHECKING:
    from collections.abc import Iterator


class Memory:
    """The elements of one tensor in its storage, kept alive and found again whatever becomes of the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with _unseen():
            self._tensor = _plain(tensor).detach()
        self._storage = self._tensor.untyped_storage()

    def overlaps(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` has an element that lies here; other parts of one storage do not count."""
        tensor = _plain(tensor)
        if tensor.layout is not torch.strided or tensor.untyped_storage()._cdata != self._storage._cdata:
            return False
        with _unseen():
            marks = torch.zeros(self._storage.nbytes(), dtype=torch.bool)
            _bytes_in(marks, self._tensor).fill_(True)
            return bool(_bytes_in(marks, tensor).any())

    def twin(self) -> Memory:
        """Return a copy elsewhere, with the same strides."""
        own = self._tensor
        with _unseen():
            copy = torch.empty_strided(own.size(), own.stride(), dtype=own.dtype, device=own.device)
            return Memory(copy.copy_(own))

    def equals(self, other: Memory) -> bool:
        """Return whether the bytes of both are the same; NaN equals itself here."""
        with _unseen():
            return torch.equal(_contiguous_bytes(self._tensor), _contiguous_bytes(other._tensor))

    def fill_from(self, other: Memory) -> None:
        """Copy the elements of `other` here."""
        with _unseen(), torch.inference_mode(self._tensor.is_inference()):
            self._tensor.copy_(other._tensor)

    def poison(self) -> None:
        """Fill it with what no program takes for data."""
        with _unseen(), torch.inference_mode(self._tensor.is_inference()):
            self._tensor.fill_(poison_of(self._tensor.dtype))

    def tensor_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it as a tensor on the device of `tensor`, the stand-in's included."""
        with _unseen():
            return NpuStandInTensor(self._tensor) if isinstance(tensor, NpuStandInTensor) else self._tensor


def poison_of(dtype: torch.dtype) -> float | int:
    """Return NaN, or the largest value of a dtype that has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.payload if isinstance(tensor, NpuStandInTensor) else tensor


def _bytes_in(marks: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of `marks`, one entry per byte of the storage, that covers the elements of `tensor`."""
    size = tensor.element_size()
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return marks.as_strided((*tensor.size(), size), strides, tensor.storage_offset() * size)


def _contiguous_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield
