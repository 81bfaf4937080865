"""Sums and maxima over ranks that need no gradient: parameter gradients, their norms and logged values."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ._mesh import group_of
from ._message import Message


def all_reduce_sum(tensors: Sequence[torch.Tensor], *, mesh: DeviceMesh | None) -> None:
    """Sum tensors over a 1-D mesh, in place; all ranks end with the same bits.

    Args:
        tensors: Tensors of any shapes, of one dtype and device; the same list on every rank. They travel as one
            message. 16-bit tensors are summed in fp32.
        mesh: 1-D mesh. None or one rank: nothing to do.

    Backward: none; gradients do not flow through it.
    """
    if group_of(mesh) is None or mesh is None or not tensors:
        return
    dtype = tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in tensors])
    Message("all_reduce", flat, flat, mesh=mesh, layer=None, phase="forward").wait()
    sums = flat.split([tensor.numel() for tensor in tensors])
    for tensor, total in zip(tensors, sums, strict=True):
        tensor.detach().copy_(total.view_as(tensor))


def all_reduce_max(tensor: torch.Tensor, *, mesh: DeviceMesh | None) -> None:
    """Take the elementwise maximum of a tensor over a 1-D mesh, in place.

    Args:
        tensor: Contiguous, of one shape and dtype on every rank.
        mesh: 1-D mesh. None or one rank: nothing to do.

    Backward: none; gradients do not flow through it.
    """
    if group_of(mesh) is None or mesh is None:
        return
    Message("all_reduce_max", tensor, tensor, mesh=mesh, layer=None, phase="forward").wait()
