"""Activation checkpointing: the gather runs again in backward, traced so, and an early stop leaves nothing behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from cp_collectives import CollectiveTrace, check_no_pending, launch_all_gather


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def attention_like(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Saves tensors before the launch, between launch and wait, and after the wait."""
    handle = launch_all_gather(x.cos(), dim=0, mesh=mesh, layer="layers.0")
    query = x.sin()
    (k,) = handle.wait()
    return query.exp() * (k * k).sum()


def ends_with_the_wait(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Saves its last tensor between launch and wait, so that a recomputation stops there."""
    handle = launch_all_gather(x.cos(), dim=0, mesh=mesh, layer="layers.0")
    query = x.sin()
    (k,) = handle.wait()
    return query + k.sum()


FORWARDS: dict[str, Callable[[torch.Tensor, DeviceMesh], torch.Tensor]] = {
    "attention-like": attention_like,
    "ends with the wait": ends_with_the_wait,
}


def gradient_of(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = torch.linspace(0, 1, 3, dtype=torch.float64) + dist.get_rank()
    x.requires_grad_()
    run(x).sum().backward()
    return x.grad


def checkpointed(name: str, use_reentrant: bool, early_stop: bool) -> dict[str, Any]:
    mesh, forward = cp_mesh(), FORWARDS[name]
    expected = gradient_of(lambda x: forward(x, mesh))
    with CollectiveTrace() as trace, set_checkpoint_early_stop(early_stop):
        found = gradient_of(lambda x: checkpoint(forward, x, mesh, use_reentrant=use_reentrant))
    drained_before = [record.waited_at is not None for record in trace.records]
    check_no_pending(where="the step")
    return {
        "same gradient": torch.equal(found, expected),
        "messages": [(record.op, record.phase) for record in trace.records],
        "waited": drained_before,
    }


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize(
    ("use_reentrant", "early_stop"),
    [(True, True), (False, True), (False, False)],
    ids=["reentrant", "non-reentrant", "non-reentrant without early stop"],
)
def test_a_checkpointed_gather_runs_again_in_backward(
    worlds: Any, name: str, use_reentrant: bool, early_stop: bool
) -> None:
    for found in worlds(2).run(checkpointed, name, use_reentrant, early_stop):
        assert found["same gradient"]
        # The exchange stands where backward meets the wait: before the recomputation if nothing after it was saved.
        assert sorted(found["messages"]) == [
            ("all_gather", "forward"),
            ("all_gather", "recompute"),
            ("all_to_all", "backward"),
        ]
        assert found["waited"] == [True] * 3


def two_checkpointed_layers(use_reentrant: bool) -> dict[str, Any]:
    mesh = cp_mesh()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return attention_like(x, mesh)

    expected = gradient_of(lambda x: layer(layer(x)))
    with CollectiveTrace() as trace:
        found = gradient_of(
            lambda x: checkpoint(layer, checkpoint(layer, x, use_reentrant=use_reentrant), use_reentrant=use_reentrant)
        )
    check_no_pending(where="the step")
    return {"same gradient": torch.equal(found, expected), "phases": [record.phase for record in trace.records]}


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_each_layer_is_recomputed_just_before_its_backward(worlds: Any, use_reentrant: bool) -> None:
    for found in worlds(2).run(two_checkpointed_layers, use_reentrant):
        assert found["same gradient"]
        assert found["phases"] == ["forward", "forward", "recompute", "backward", "recompute", "backward"]
