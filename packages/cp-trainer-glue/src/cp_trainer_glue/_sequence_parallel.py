"""Sharding the residual stream of a decoder along the sequence, over tensor-parallel ranks.

B batch, L tokens of this context-parallel rank, T tensor-parallel ranks, H hidden size. Between split modules each rank
has `[B, L / T, H]`, inside them `[B, L, H]`. Hooks of modules do it, which stay when a forward is replaced.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers.distributed.tensor_parallel import ColwiseParallel

from cp_core import InvalidInputError

from ._sequence_parallel_plan import SequenceParallelPlan

_TOKENS = Shard(1)


class ColwiseOfGathered(ColwiseParallel):  # type: ignore[misc]  # transformers has no types
    """A column-wise layer whose input's gradient stays a part: it is summed with those beside it, by one message."""

    def transform_inputs_pre_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take a local `[B, L, H]`, the same on all ranks."""
        whole = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False, grad_placements=[Partial()])
        return (whole, *args[1:]), kwargs


def shard_residual_stream(
    modules: Mapping[str, torch.nn.Module], plan: SequenceParallelPlan, tp_mesh: DeviceMesh
) -> None:
    """Cut the residual stream before the first layer, gather it for each split module and behind the last norm.

    Args:
        modules: The model's modules by name.
        plan: Where.
        tp_mesh: 1-D mesh.

    Backward: what was cut is gathered. What was gathered is cut, after a sum where gradients are parts.
    """
    cut, gather = partial(_cut, tp_mesh), partial(_gathered, tp_mesh, Replicate())
    _before(modules[plan.first_layer], cut)
    _behind(modules[plan.last_norm], gather)
    for name in plan.dense:
        _before(modules[name], partial(_gathered, tp_mesh, Partial()))
    for name in plan.experts:
        _before(modules[name], gather)
        _behind(modules[name], cut)


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


def _before(module: torch.nn.Module, change: Any) -> None:
    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
        return (change(args[0]), *args[1:]), kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _behind(module: torch.nn.Module, change: Any) -> None:
    module.register_forward_hook(lambda _module, _args, output: change(output))
