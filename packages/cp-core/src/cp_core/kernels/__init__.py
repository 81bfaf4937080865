"""Attention of one block of queries with one block of keys, per device; the only dispatch by device in this package.

Files, lowest first: `_block`, `_square`, then one per kernel.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from cp_collectives import UnsupportedError

from ._block import AttendedBlock, BlockKernel, Visible, accumulation_dtype
from ._cpu_flash import CpuFlash
from ._cuda_efficient import CudaEfficient
from ._cuda_flash import CudaFlash
from ._math import MathBlock

__all__ = ["AttendedBlock", "BlockKernel", "Visible", "accumulation_dtype", "block_kernel"]

# NPU is not here: its kernel has a place (`SquareKernel`) and has to be written where one can run it.
_KERNELS: Mapping[str, Mapping[torch.dtype, BlockKernel]] = MappingProxyType(
    {
        "cpu": dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), CpuFlash()),
        "cuda": {
            torch.float64: MathBlock(),
            torch.float32: CudaEfficient(),
            torch.bfloat16: CudaFlash(),
            torch.float16: CudaFlash(),
        },
    }
)


def block_kernel(device: torch.device, dtype: torch.dtype) -> BlockKernel:
    """Return the kernel of a device for inputs of a dtype.

    Raises:
        UnsupportedError: If this version has none for the device's type, or none there for the dtype.
    """
    kernels = _KERNELS.get(device.type)
    if kernels is None:
        raise UnsupportedError(
            f"no attention kernel for device type {device.type!r} in this version of cp-core; available: "
            f"{', '.join(sorted(_KERNELS))}."
        )
    if dtype not in kernels:
        raise UnsupportedError(
            f"no attention kernel for {dtype} on device type {device.type!r} in this version of cp-core; available: "
            f"{', '.join(sorted(map(str, kernels)))}."
        )
    return kernels[dtype]
