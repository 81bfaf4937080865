"""Splitting a model over tensor-parallel ranks in place, and the sum of the gradients of which each rank has a part."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import RowwiseParallel

from cp_core import sum_gradients

from ._sequence_parallel import ColwiseOfGathered, shard_residual_stream
from ._tensor_parallel_plan import TensorParallelPlan

# Parameters whose gradient needs a sum over tensor-parallel ranks, once per step, with the group.
TpGradInfo = dict[str, torch.distributed.ProcessGroup]


def apply_tensor_parallel(
    model: torch.nn.Module, plan: TensorParallelPlan | None, tp_mesh: DeviceMesh | None
) -> TpGradInfo:
    """Split a model over the ranks of a mesh, in place: its sharded parameters become DTensors.

    Every rank has the whole model before, with equal weights; nothing is sent.

    Args:
        model: The planned model, before context parallelism, activation checkpointing, compile and FSDP.
        plan: Its plan; None leaves it alone.
        tp_mesh: 1-D mesh, a child of the mesh that FSDP will get its own from.

    Returns:
        The parameters that stay whole on each rank and of whose gradient each rank finds a part.
    """
    if plan is None or tp_mesh is None:
        return {}
    modules, split = dict(model.named_modules(remove_duplicate=False)), dict[int, torch.nn.Parameter]()
    styles = {place: _style(plan, place, name) for place, name in plan.styles.items()}
    for place, style in styles.items():
        owner, _, name = place.rpartition(".")
        if place in modules:
            style.install_forward(modules[place], tp_mesh)
        else:
            _split_parameter(modules[owner], name, style, tp_mesh, split)
    if plan.sequence_parallel is not None:
        shard_residual_stream(modules, plan.sequence_parallel, tp_mesh)
    return dict.fromkeys(plan.partial, tp_mesh.get_group())


def sum_tp_gradients(model: torch.nn.Module, tp_grad_info: Mapping[str, Any], tp_mesh: DeviceMesh | None) -> None:
    """Sum the gradients of which each tensor-parallel rank has a part, in place.

    Call it once per step, after the last backward. A second call would sum the sums.

    Args:
        model: The model; its parameters may have become DTensors of FSDP since.
        tp_grad_info: What `apply_sharding_plan` returned for it.
        tp_mesh: 1-D mesh of the tensor-parallel ranks.
    """
    if tp_grad_info:
        sum_gradients([model.get_parameter(name) for name in tp_grad_info], tp_mesh)


def _style(plan: TensorParallelPlan, place: str, name: str) -> Any:
    """Return the object of transformers that carries a style out."""
    if place == plan.sharded_output:
        return ALL_PARALLEL_STYLES["colwise"]
    owner = place.rpartition(".")[0]
    if plan.sequence_parallel is not None and owner in plan.sequence_parallel.dense:
        if name == "rowwise":
            return RowwiseParallel(output_layouts=Shard(1))
        if name == "colwise":
            return ColwiseOfGathered()
    return ALL_PARALLEL_STYLES[name]


def _split_parameter(
    module: torch.nn.Module, name: str, style: Any, tp_mesh: DeviceMesh, split: dict[int, torch.nn.Parameter]
) -> None:
    """Split one parameter; one that is tied to another stays tied."""
    whole = module._parameters[name]
    if whole is None:
        raise AssertionError(f"a plan names the parameter {name!r}, which its {type(module).__name__} lacks.")
    if id(whole) not in split:
        style.shard_param(module, name, tp_mesh)
        split[id(whole)] = _settled(module._parameters[name], whole)
    module._parameters[name] = split[id(whole)]


def _settled(parameter: Any, whole: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a sharded parameter without the memory of the whole, whose gradients come in its own placement."""
    if not isinstance(parameter, DTensor):
        raise AssertionError("a style of transformers left a parameter unsplit that its plan names.")
    local = parameter.to_local().detach()
    settled = torch.nn.Parameter(
        DTensor.from_local(
            local.clone(memory_format=torch.contiguous_format),  # a view would keep the whole one alive
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        ),
        requires_grad=whole.requires_grad,
    )
    if settled.requires_grad:
        # An embedding's gradient comes as large as the whole vocabulary, and an output bias's as a part of a sum.
        settled.register_hook(lambda gradient: gradient.redistribute(placements=parameter.placements))
    return settled
