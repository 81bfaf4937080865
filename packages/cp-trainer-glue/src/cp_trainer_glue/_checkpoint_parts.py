"""What torch.distributed.checkpoint can store: a shard of several strips of its tensor goes as a tensor of its own.

Tensor parallelism splits packed projections (gate and up in one) part by part, so a rank's shard is no one block of the
whole, which is all that torch.distributed.checkpoint knows. A checkpoint is resumed under its own layout, so the shard
itself, under a name that says whose it is, is enough.
"""

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

_TENSOR_PARALLEL = "tp"


def in_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested state in which each shard of strips is its local tensor, of the same memory, under a new name."""
    parts: dict[str, Any] = {}
    for name, value in state.items():
        parts[_part_name(name, value)] = _part(value)
    return parts


def from_parts(state: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with what was loaded into its parts.

    Args:
        state: What `in_parts` was given.
        parts: What it returned, loaded in place.
    """
    whole: dict[str, Any] = {}
    for name, value in state.items():
        loaded = parts[_part_name(name, value)]
        if isinstance(value, Mapping):
            whole[name] = from_parts(value, loaded)
        else:
            whole[name] = value if _is_of_strips(value) else loaded
    return whole


def _part(value: Any) -> Any:
    if isinstance(value, Mapping):
        return in_parts(value)
    return value.to_local() if _is_of_strips(value) else value


def _part_name(name: str, value: Any) -> str:
    if not _is_of_strips(value):
        return name
    coordinates = zip(value.device_mesh.get_coordinate() or (), value.placements, strict=True)
    return f"{name}.part." + ".".join(str(index) for index, placement in coordinates if not placement.is_replicate())


def _is_of_strips(value: Any) -> bool:
    if not isinstance(value, DTensor):
        return False
    axes = zip(value.device_mesh.mesh_dim_names or (), value.placements, strict=True)
    return any(axis == _TENSOR_PARALLEL and isinstance(placement, _StridedShard) for axis, placement in axes)
