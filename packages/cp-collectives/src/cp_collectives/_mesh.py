"""Reading a 1-D mesh: the one place where a mesh of one rank becomes an identity."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._errors import InvalidInputError


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of a 1-D mesh, or None where nothing has to travel.

    Args:
        mesh: A 1-D mesh, or None.

    Returns:
        The group, or None for no mesh and for a mesh of one rank: callers treat None as the identity.

    Raises:
        InvalidInputError: If the mesh has more than one axis.
    """
    if mesh is None:
        return None
    if mesh.ndim != 1:
        raise InvalidInputError(
            f"collectives run over one mesh axis, but got a mesh with {mesh.ndim} axes "
            f"{mesh.mesh_dim_names or tuple(mesh.shape)}; pass one axis of it, such as mesh['cp']."
        )
    if mesh.size() == 1:
        return None
    return mesh.get_group()


def mesh_size(mesh: DeviceMesh | None) -> int:
    """Return the number of ranks of a 1-D mesh; 1 for None."""
    return 1 if group_of(mesh) is None or mesh is None else mesh.size()


def mesh_rank(mesh: DeviceMesh | None) -> int:
    """Return this process's position on a 1-D mesh; 0 for None."""
    return 0 if group_of(mesh) is None or mesh is None else mesh.get_local_rank()


def mesh_name(mesh: DeviceMesh) -> str:
    """Return the axis name of a 1-D mesh, or its group's name where the axis has none."""
    return mesh.mesh_dim_names[0] if mesh.mesh_dim_names else mesh.get_group().group_name
