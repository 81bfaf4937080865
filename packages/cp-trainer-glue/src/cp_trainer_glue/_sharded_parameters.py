"""Sharded parameters, gradients and optimizer states, through torch's FSDP2."""

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ._blocks import transformer_blocks
from ._config import FsdpConfig


def shard_parameters(model: torch.nn.Module, mesh: DeviceMesh, config: FsdpConfig) -> None:
    """Shard a model's parameters block by block; the last change to a model before its optimizer is made.

    Gradients are summed over the mesh and not averaged, so that `mean_global_loss(..., grad_average_degree=1)` is right
    in every mesh.

    Args:
        model: The model, changed in place.
        mesh: 1-D mesh of shards, or 2-D mesh (replicas, shards).
        config: Dtypes, and when gathered parameters are freed.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(config.param_dtype),
        reduce_dtype=_dtype(config.reduce_dtype),
        # Positions and rotary tables stay as the model made them; the blocks cast what they need.
        cast_forward_inputs=config.param_dtype is not None,
    )
    for block in transformer_blocks(model).values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in sharded_modules(model):
        # gloo has no PREMUL_SUM, to which a factor alone would come; a plain sum is right on every backend.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # A parameter that this rank did not use is zero here, and takes part in the sum with the ranks that did.
        module.set_reduce_scatter_unused_params(True)


def sharded_modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    """Yield the parts of a model that FSDP gathers as one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
