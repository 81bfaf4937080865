"""Sharded parameters, gradients and optimizer states, through torch's FSDP2."""

from collections.abc import Iterator
from functools import partial
from typing import Any

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
    param_dtype = _dtype(config.param_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=_dtype(config.reduce_dtype),
        # FSDP would take the layout of the shard apart, a dataclass, to cast what is in it.
        cast_forward_inputs=False,
    )
    if param_dtype is not None:
        model.register_forward_pre_hook(partial(_cast_inputs, param_dtype), with_kwargs=True)
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


def _cast_inputs(
    dtype: torch.dtype, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast what a model is given in floating point, such as `inputs_embeds`."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
