"""Which ranks form which groups, worked out without any rank."""

import torch

from ._config import AcceleratorConfig

# From the outermost axis to the innermost, as the device mesh has them.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_DATA_AXES = ("dp_replicate", "dp_shard", "cp")


def axis_sizes(accelerator: AcceleratorConfig) -> dict[str, int]:
    """Return the size of each axis of the device mesh, outermost first."""
    return {axis: int(getattr(accelerator, f"{axis}_size")) for axis in AXES}


def axis_groups(accelerator: AcceleratorConfig) -> dict[str, list[list[int]]]:
    """Return the ranks of each group along each axis, and along data and context parallel taken as one.

    With cp 2 and tp 2 the mesh is `[[0, 1], [2, 3]]`: the groups of tp are 01 and 23, those of cp are 02 and 13.
    """
    sizes = axis_sizes(accelerator)
    mesh = torch.arange(accelerator.world_size).view(*sizes.values())
    groups = {axis: _groups_along(mesh, (index,)) for index, axis in enumerate(AXES)}
    return {**groups, "dp_cp": _groups_along(mesh, tuple(AXES.index(axis) for axis in _DATA_AXES))}


def _groups_along(mesh: torch.Tensor, dims: tuple[int, ...]) -> list[list[int]]:
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    size = 1
    for dim in dims:
        size *= mesh.shape[dim]
    groups: list[list[int]] = mesh.permute(*others, *dims).reshape(-1, size).tolist()
    return groups
