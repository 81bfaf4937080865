"""The whole layer on a device that is neither cpu nor cuda: the stand-in npu, gloo beneath. No NPU evidence."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from cp_collectives import (
    CollectiveTrace,
    InvalidInputError,
    LifecycleError,
    agree,
    all_gather_sequence,
    all_reduce_sum,
    check_no_pending,
    current_platform,
    launch_all_gather,
)
from cp_collectives.testing import World, install_npu_stand_in, to_cpu, to_npu


@pytest.fixture
def world(worlds: Any) -> World:
    found: World = worlds(2, setup=install_npu_stand_in, backend="cpu:gloo,npu:gloo")
    return found


def npu_mesh() -> DeviceMesh:
    return init_device_mesh("npu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def data(rank: int) -> torch.Tensor:
    return torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def local(add: int = 0) -> torch.Tensor:
    return to_npu(data(dist.get_rank() + add)).requires_grad_()


def gather_and_back(reduction: str) -> dict[str, Any]:
    mesh, k, v = npu_mesh(), local(), local(5)
    with CollectiveTrace() as trace:
        handle = launch_all_gather(k, v, dim=2, mesh=mesh, layer="layers.0", reduction=reduction)
        global_k, global_v = handle.wait()
        ((global_k**2).sum() * (dist.get_rank() + 1) + global_v.sum()).backward()
    check_no_pending(where="the step")
    expected = torch.cat([data(0), data(1)], 2)
    return {
        "devices": {global_k.device.type, k.grad.device.type},
        "forward": torch.equal(to_cpu(global_k.detach()), expected),
        "dk": torch.allclose(to_cpu(k.grad), 2 * 3 * data(dist.get_rank()), rtol=0, atol=1e-12),
        "dv": to_cpu(v.grad).unique().tolist(),
        "records": [(r.op, r.phase, r.layer, r.bytes_received) for r in trace.records],
    }


@pytest.mark.parametrize(("reduction", "op"), [("exchange", "all_to_all"), ("reduce_scatter", "reduce_scatter")])
def test_a_gather_goes_forward_and_backward(world: World, reduction: str, op: str) -> None:
    bytes_received = 3 * 16 * 8
    for found in world.run(gather_and_back, reduction):
        assert found == {
            "devices": {"npu"},
            "forward": True,
            "dk": True,
            "dv": [2.0],
            "records": [
                ("all_gather", "forward", "layers.0", bytes_received),
                (op, "backward", "layers.0", bytes_received),
            ],
        }


def gather_checkpointed(use_reentrant: bool) -> dict[str, Any]:
    mesh, x = npu_mesh(), local()

    def layer(x: torch.Tensor) -> torch.Tensor:
        handle = launch_all_gather(x * 2, dim=2, mesh=mesh, layer="layers.0")
        query = x * x
        (k,) = handle.wait()
        return query + (k * k).sum()

    with CollectiveTrace() as trace:
        checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=False).sum().backward()
    check_no_pending(where="the step")
    num_entries = 24
    expected = 2 * data(dist.get_rank()) + 2 * num_entries * 8 * data(dist.get_rank())
    return {
        "close": torch.allclose(to_cpu(x.grad), expected, rtol=0, atol=1e-10),
        "phases": [r.phase for r in trace.records],
    }


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_checkpointed_gather_runs_again_in_backward(world: World, use_reentrant: bool) -> None:
    expected = {"close": True, "phases": ["forward", "recompute", "backward"]}
    assert world.run(gather_checkpointed, use_reentrant) == [expected] * 2


def control() -> list[str]:
    mesh, found = npu_mesh(), []
    handle = launch_all_gather(local(), dim=2, mesh=mesh, layer="npu.0")
    handle.wait()
    try:
        handle.wait()
    except LifecycleError as error:
        found.append(str(error))
    launch_all_gather(local(), dim=2, mesh=mesh, layer="npu.1")
    try:
        check_no_pending(where="the step")
    except LifecycleError as error:
        found.append(str(error))
    try:
        agree("bad batch." if dist.get_rank() else None, mesh=mesh)
    except InvalidInputError as error:
        found.append(str(error))
    return found


def test_faults_are_found_as_on_the_cpu(world: World) -> None:
    for twice, dropped, agreed in world.run(control):
        assert twice.startswith("all_gather of layer 'npu.0' (invocation 1) was waited for twice")
        assert dropped.startswith("all_gather of layer 'npu.1' (invocation 1): launched and dropped without wait()")
        assert agreed == "rank 1: bad batch."


def sum_values() -> tuple[str, list[float]]:
    value = to_npu(torch.tensor([256.0 if dist.get_rank() == 0 else 3.0], dtype=torch.bfloat16))
    all_reduce_sum([value], mesh=npu_mesh())
    return value.device.type, to_cpu(value).tolist()


def test_values_are_summed_in_place(world: World) -> None:
    assert world.run(sum_values) == [("npu", [260.0])] * 2


def mix_devices() -> str:
    try:
        all_gather_sequence(local(), data(0), dim=2, mesh=npu_mesh())
    except InvalidInputError as error:
        return str(error)
    return "no error"


def test_tensors_of_two_devices_are_refused(world: World) -> None:
    for message in world.run(mix_devices):
        assert "torch.float64 on npu:0 and torch.float64 on cpu" in message


def platform_of_a_tensor() -> tuple[str, str | None]:
    platform = current_platform(local().device)
    return platform.backend, platform.extension


def test_the_platform_of_a_tensor_is_its_devices(world: World) -> None:
    assert world.run(platform_of_a_tensor) == [("hccl", "torch_npu")] * 2
