"""Attention of one block of queries with one block of keys, per device; the only dispatch by device in this package."""

import torch

from cp_collectives import UnsupportedError

from ._block import AttendedBlock, BlockKernel, Visible
from ._cpu_flash import CpuFlash

__all__ = ["AttendedBlock", "BlockKernel", "Visible", "block_kernel"]

_KERNELS: dict[str, BlockKernel] = {"cpu": CpuFlash()}


def block_kernel(device: torch.device, dtype: torch.dtype) -> BlockKernel:
    """Return the kernel of a device.

    Raises:
        UnsupportedError: If this version has none for its type.
    """
    kernel = _KERNELS.get(device.type)
    if kernel is None:
        raise UnsupportedError(
            f"no attention kernel for device type {device.type!r} in this version of cp-core; available: "
            f"{', '.join(sorted(_KERNELS))}."
        )
    return kernel
