"""The norm of all gradients, equal in every mesh, and clipping by it.

A sharded gradient adds its local part to the norm and is summed over the mesh axes that shard it; along the axes that
replicate it each rank holds the whole, which counts once. Parameters may lie on different meshes: each set of axes is
summed by itself, and the sums are added.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_collectives import InvalidInputError, all_reduce_max, all_reduce_sum

# What torch's own clipping adds to the norm before it divides, so that the scale is that of one process.
_EPSILON = 1e-6


class _Domain(NamedTuple):
    """Where the parts of a gradient lie; hashable, and the same on all ranks that share the parameter."""

    mesh: DeviceMesh | None
    # Mesh axes that shard it.
    axes: tuple[int, ...]
    device: torch.device


def clip_grad_norm(params: Iterable[torch.nn.Parameter], max_norm: float, *, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`.

    Gradients must already be those of the whole batch: after `sum_gradients`, or after FSDP reduced them. Plain tensors
    count as equal on all ranks; sharded ones (`DTensor`) are summed over the axes that shard them. The result is that
    of `torch.nn.utils.clip_grad_norm_` in one process.

    Args:
        params: The model's parameters, the same list on every rank; they may lie on different meshes.
        max_norm: Upper bound of the norm; infinity measures without clipping.
        norm_type: The p of the p-norm; infinity is the largest entry.

    Returns:
        The norm before clipping, 0-d, in fp32 or wider, equal on all ranks.

    Raises:
        InvalidInputError: If a gradient is placed otherwise than its parameter, such as a partial sum, which has no
            norm yet.
    """
    unique = [param for param in dict.fromkeys(params) if param.requires_grad]  # tied ones may come twice
    norm = _total_norm(unique, float(norm_type))
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for param in unique:
        if param.grad is not None:
            gradient = _local(param.grad)
            gradient.mul_(scale.to(gradient.device))
    return norm


def _total_norm(params: Sequence[torch.nn.Parameter], norm_type: float) -> torch.Tensor:
    domains: dict[_Domain, list[torch.nn.Parameter]] = {}
    for index, param in enumerate(params):
        domains.setdefault(_domain_of(param, index), []).append(param)
    norms = [_domain_norm(domain, members, norm_type) for domain, members in domains.items()]
    return torch.linalg.vector_norm(_stacked(norms), norm_type) if norms else torch.zeros(())


def _domain_of(param: torch.nn.Parameter, index: int) -> _Domain:
    if not isinstance(param, DTensor):
        return _Domain(None, (), param.device)
    if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
        raise InvalidInputError(
            f"clip_grad_norm: parameter {index} is placed {param.placements}, but its gradient "
            f"{param.grad.placements}; call sum_gradients first."
        )
    axes = tuple(axis for axis, placement in enumerate(param.placements) if not placement.is_replicate())
    return _Domain(param.device_mesh if axes else None, axes, param.device)


def _domain_norm(domain: _Domain, params: Sequence[torch.nn.Parameter], norm_type: float) -> torch.Tensor:
    """Return the norm of one domain's gradients, equal on all its ranks.

    A rank that has none of them takes part all the same.
    """
    wide = torch.promote_types(_widest([param.dtype for param in params]), torch.float32)
    gradients = [_local(param.grad) for param in params if param.grad is not None]
    held = [gradient for gradient in gradients if gradient.numel()]  # an uneven shard may hold nothing
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=wide) for gradient in held]
    zero = torch.zeros((), dtype=wide, device=domain.device)
    own: torch.Tensor = torch.linalg.vector_norm(torch.stack([*norms, zero]), norm_type)
    if domain.mesh is None:
        return own
    return _norm_over_ranks(own, [_axis_of(domain.mesh, axis) for axis in domain.axes], norm_type)


def _norm_over_ranks(norm: torch.Tensor, meshes: Sequence[DeviceMesh], norm_type: float) -> torch.Tensor:
    if math.isinf(norm_type):
        for mesh in meshes:
            all_reduce_max(norm, mesh=mesh)
        return norm
    powers = torch.pow(norm, norm_type)
    for mesh in meshes:
        all_reduce_sum([powers], mesh=mesh)
    return torch.pow(powers, 1.0 / norm_type)


def _stacked(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = _widest([norm.dtype for norm in norms])
    return torch.stack([norm.to(norms[0].device, wide) for norm in norms])


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def _axis_of(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise InvalidInputError("clip_grad_norm: a mesh of several axes needs names; pass mesh_dim_names to it.")
    return mesh[mesh.mesh_dim_names[axis]]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.detach()
