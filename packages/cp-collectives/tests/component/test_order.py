"""When messages start and end: what stands between launch and wait stands there in backward too."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_collectives import CollectiveTrace, check_no_pending, launch_all_gather


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


class Work(torch.autograd.Function):
    """Stands for compute: writes down when it ran, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, events: list[tuple[str, str, float]]) -> torch.Tensor:
        ctx.name, ctx.events = name, events
        events.append((name, "forward", time.perf_counter()))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.events.append((ctx.name, "backward", time.perf_counter()))
        return grads[0] * 2, None, None


def layer(x: torch.Tensor, mesh: DeviceMesh, name: str, events: list[tuple[str, str, float]]) -> torch.Tensor:
    handle = launch_all_gather(x.cos(), x.sin(), dim=0, mesh=mesh, layer=name)
    query = Work.apply(x, name, events)
    k, v = handle.wait()
    return query * k.sum() + v.mean()


def two_layers() -> list[tuple[float, str]]:
    """Run two layers forward and backward; return all events of both kinds in the order of time."""
    mesh, events = cp_mesh(), []
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with CollectiveTrace() as trace:
        layer(layer(x, mesh, "a", events), mesh, "b", events).sum().backward()
    check_no_pending(where="the test")
    marks = [(moment, f"{phase} work {name}") for name, phase, moment in events]
    for record in trace.records:
        marks.append((record.launched_at, f"{record.phase} launch {record.layer}"))
        marks.append((record.waited_at or 0.0, f"{record.phase} wait {record.layer}"))
    return [name for _, name in sorted(marks)]


def test_backward_launches_where_forward_waited_and_waits_where_forward_launched(worlds: Any) -> None:
    forward = [f"forward {step} {layer}" for layer in "ab" for step in ("launch", "work", "wait")]
    backward = [f"backward {step} {layer}" for layer in "ba" for step in ("launch", "work", "wait")]
    assert worlds(2).run(two_layers) == [forward + backward] * 2


def two_in_flight() -> dict[str, Any]:
    """Launch two gathers and wait for them in the other order."""
    mesh = cp_mesh()
    x = torch.full((2,), float(dist.get_rank() + 1), dtype=torch.float64, requires_grad=True)
    with CollectiveTrace() as trace:
        first = launch_all_gather(x, dim=0, mesh=mesh, layer="first")
        second = launch_all_gather(2 * x, dim=0, mesh=mesh, layer="second")
        (late,) = second.wait()
        (early,) = first.wait()
        (early * late).sum().backward()
    check_no_pending(where="the test")
    return {
        "values": (early.tolist(), late.tolist()),
        "gradient": x.grad.tolist(),
        "order": [(record.layer, record.phase) for record in trace.records],
    }


def test_two_gathers_in_flight_may_be_waited_for_in_any_order(worlds: Any) -> None:
    for rank, found in enumerate(worlds(2).run(two_in_flight)):
        assert found["values"] == ([1, 1, 2, 2], [2, 2, 4, 4])
        assert found["gradient"] == [2 * 4.0 * (rank + 1)] * 2  # both ranks' sums of 2 * x ** 2
        assert found["order"] == [
            ("first", "forward"),
            ("second", "forward"),
            ("first", "backward"),
            ("second", "backward"),
        ]


def skewed_ranks() -> bool:
    """Let ranks reach their launches and waits at different times."""
    mesh, right = cp_mesh(), True
    for step in range(6):
        time.sleep(0.01 * ((dist.get_rank() + step) % 2))
        x = torch.full((2,), float(10 * step + dist.get_rank()), dtype=torch.float64, requires_grad=True)
        handle = launch_all_gather(x, dim=0, mesh=mesh)
        time.sleep(0.01 * ((dist.get_rank() + step + 1) % 2))
        (found,) = handle.wait()
        found.sum().backward()
        right &= found.tolist() == [10 * step, 10 * step, 10 * step + 1, 10 * step + 1]
        right &= x.grad.tolist() == [2.0, 2.0]
    return right


def test_skew_between_ranks_does_not_mix_messages(worlds: Any) -> None:
    assert worlds(2).run(skewed_ranks) == [True, True]
