"""The meshes of a run, all made before the first forward."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_collectives import Platform
from cp_core import InvalidInputError

from ._config import AcceleratorConfig

_DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshContext:
    """Where this rank stands: the mesh of all ranks and the axes that a trainer asks for."""

    # Axes pp, dp_replicate, dp_shard, cp, tp; tp innermost.
    device_mesh: DeviceMesh
    # All ranks in one axis, for agreements.
    world_mesh: DeviceMesh
    # Ranks that share sequences.
    cp_mesh: DeviceMesh
    # Ranks that hold different tokens: data and context parallel in one axis.
    dp_cp_mesh: DeviceMesh
    # Ranks that hold copies or shards of one computation.
    tp_mesh: DeviceMesh
    # Ranks that must be given the same global batch: context and tensor parallel in one axis.
    same_data_mesh: DeviceMesh
    # Ranks over which FSDP shards parameters: dp_shard and cp in one axis; before it dp_replicate, if there is more
    # than one replica.
    fsdp_mesh: DeviceMesh
    device: torch.device
    dp_rank: int
    dp_size: int

    @classmethod
    def build(cls, accelerator: AcceleratorConfig, platform: Platform, device: torch.device) -> Self:
        """Make the meshes; every rank of the default process group calls it.

        Args:
            accelerator: Sizes of the axes.
            platform: The platform of `device`.
            device: This rank's device.

        Raises:
            InvalidInputError: If the sizes do not multiply to the world size.
        """
        world_size = dist.get_world_size()
        if accelerator.world_size != world_size:
            raise InvalidInputError(
                f"the accelerator sizes multiply to {accelerator.world_size} ranks, but {world_size} were started."
            )
        sizes = {
            "pp": accelerator.pp_size,
            "dp_replicate": accelerator.dp_replicate_size,
            "dp_shard": accelerator.dp_shard_size,
            "cp": accelerator.cp_size,
            "tp": accelerator.tp_size,
        }
        mesh = init_device_mesh(platform.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        dp_replicate_rank, dp_shard_rank = (mesh.get_local_rank(axis) for axis in _DATA_AXES)
        return cls(
            device_mesh=mesh,
            world_mesh=world_mesh(device),
            cp_mesh=mesh["cp"],
            dp_cp_mesh=mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp"),
            tp_mesh=mesh["tp"],
            same_data_mesh=mesh["cp", "tp"]._flatten("cp_tp"),
            fsdp_mesh=_fsdp_mesh(mesh, num_replicas=accelerator.dp_replicate_size),
            device=device,
            dp_rank=dp_replicate_rank * accelerator.dp_shard_size + dp_shard_rank,
            dp_size=accelerator.dp_size,
        )


def world_mesh(device: torch.device) -> DeviceMesh:
    """Return a mesh of all ranks in one axis."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("world",))


def _fsdp_mesh(mesh: DeviceMesh, *, num_replicas: int) -> DeviceMesh:
    """Return the mesh for FSDP; never `(dp_shard, cp)`, which FSDP would read as replicas of shards."""
    shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    return shards if num_replicas == 1 else mesh["dp_replicate", "dp_shard_cp"]
