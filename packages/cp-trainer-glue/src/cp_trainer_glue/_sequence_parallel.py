"""Sharding the residual stream of a decoder along the sequence, over tensor-parallel ranks.

B batch, L tokens of this context-parallel rank, T tensor-parallel ranks, H hidden size. Each rank has `[B, L / T, H]`
of the stream and `[B, L, H]` behind a norm, which is what attention and MLP are given. The modules whose forward
changes are such that no context-parallel method and no recomputation of attentions replaces them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers.distributed.tensor_parallel import ColwiseParallel

from cp_core import InvalidInputError

from ._sequence_parallel_plan import SequenceParallelPlan

_TOKENS = Shard(1)
_Change = Callable[[torch.Tensor], torch.Tensor]


class ColwiseOfGathered(ColwiseParallel):  # type: ignore[misc]  # transformers has no types
    """A column-wise layer whose input's gradient stays a part: it is summed with those beside it, by one message."""

    def transform_inputs_pre_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take a local `[B, L, H]`, the same on all ranks."""
        if not torch.is_grad_enabled():  # transformers computes on local tensors then
            return super().transform_inputs_pre_forward(module, args, kwargs, mesh)  # type: ignore[no-any-return]
        whole = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False, grad_placements=[Partial()])
        return (whole, *args[1:]), kwargs


def shard_residual_stream(
    modules: Mapping[str, torch.nn.Module], plan: SequenceParallelPlan, tp_mesh: DeviceMesh
) -> None:
    """Cut the residual stream before the first layer and behind experts, and gather what norms make of it.

    Args:
        modules: The model's modules by name.
        plan: Where.
        tp_mesh: 1-D mesh.

    Backward: what was cut is gathered. What was gathered is cut, after a sum where gradients are parts.
    """
    _change_input(modules[plan.first_layer], partial(_cut, tp_mesh))
    for name in plan.norms_before_dense:
        _change_output(modules[name], partial(_gathered, tp_mesh, Partial()))
    for name in plan.other_norms:
        _change_output(modules[name], partial(_gathered, tp_mesh, Replicate()))
    for name in plan.experts:
        _change_output(modules[name], partial(_cut, tp_mesh))


def _cut(tp_mesh: DeviceMesh, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.shape[1] % tp_mesh.size():
        raise InvalidInputError(
            f"sequence_parallel cuts the {hidden.shape[1]} tokens of this rank into {tp_mesh.size()} equal shards; pad "
            "the batch to a multiple (shard_batch with multiple_of)."
        )
    whole = DTensor.from_local(hidden, tp_mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[_TOKENS]).to_local()


def _gathered(tp_mesh: DeviceMesh, gradient: Placement, hidden: torch.Tensor) -> torch.Tensor:
    shards = DTensor.from_local(hidden, tp_mesh, [_TOKENS], run_check=False)
    return shards.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])


def _change_input(module: Any, change: _Change) -> None:
    forward = module.forward

    def of_changed(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(change(hidden_states), *args, **kwargs)

    module.forward = of_changed


def _change_output(module: Any, change: _Change) -> None:
    forward = module.forward

    def changed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return change(forward(*args, **kwargs))

    module.forward = changed
