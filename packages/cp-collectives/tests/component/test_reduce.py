"""Sums over ranks of tensors that need no gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_collectives import CollectiveTrace, all_reduce_max, all_reduce_sum


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def data(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def sum_several() -> dict[str, Any]:
    mesh, rank = cp_mesh(), dist.get_rank()
    values = [data(rank, 3, 2), data(rank + 10, 4).view(2, 2).t(), data(rank + 20).requires_grad_()]
    with CollectiveTrace() as trace:
        all_reduce_sum(values, mesh=mesh)
    ranks = range(mesh.size())
    expected = [
        sum(data(r, 3, 2) for r in ranks),
        sum(data(r + 10, 4).view(2, 2).t() for r in ranks),
        sum(data(r + 20) for r in ranks),
    ]
    return {
        "close": all(torch.allclose(v, e, rtol=0, atol=1e-14) for v, e in zip(values, expected, strict=True)),
        "messages": [(r.op, r.phase, r.dtype, r.bytes_received) for r in trace.records],
        "leaf": values[2].is_leaf and values[2].requires_grad,
        "values": [value.detach() for value in values],
    }


@pytest.mark.parametrize("cp", [2, 4])
def test_several_tensors_are_summed_in_place_in_one_message(worlds: Any, cp: int) -> None:
    found = worlds(cp).run(sum_several)
    for one in found:
        assert one["close"]
        assert one["leaf"]
        assert one["messages"] == [("all_reduce", "forward", torch.float64, 2 * (6 + 4 + 1) * 8 * (cp - 1) // cp)]
    for one in found[1:]:  # all ranks end with the same bits
        assert all(torch.equal(a, b) for a, b in zip(one["values"], found[0]["values"], strict=True))


def sum_16_bit() -> dict[torch.dtype, float]:
    mesh, found = cp_mesh(), {}
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        value = torch.tensor([large if dist.get_rank() == 0 else 1.0], dtype=dtype)
        all_reduce_sum([value], mesh=mesh)
        found[dtype] = value.item()
    return found


def test_16_bit_tensors_are_summed_in_fp32(worlds: Any) -> None:
    # In 16 bits each added 1 would be lost, in whatever order, as long as the large value is in the sum.
    assert worlds(4).run(sum_16_bit) == [{torch.bfloat16: 260.0, torch.float16: 2052.0}] * 4


def sum_nothing() -> int:
    mesh = cp_mesh()
    with CollectiveTrace() as trace:
        all_reduce_sum([], mesh=mesh)
    return len(trace.records)


def test_an_empty_list_sends_nothing(worlds: Any) -> None:
    assert worlds(2).run(sum_nothing) == [0, 0]


def sum_integers() -> int:
    value = torch.tensor([2**24 + 1])
    all_reduce_sum([value], mesh=cp_mesh())
    return value.item()


def test_integers_are_summed_exactly(worlds: Any) -> None:
    assert worlds(2).run(sum_integers) == [2 * (2**24 + 1)] * 2


def largest() -> tuple[list[float], list[tuple[str, int]]]:
    value = torch.tensor([float(dist.get_rank()), -float(dist.get_rank())])
    with CollectiveTrace() as trace:
        all_reduce_max(value, mesh=cp_mesh())
    return value.tolist(), [(record.op, record.bytes_received) for record in trace.records]


def test_the_maximum_is_elementwise_and_one_message(worlds: Any) -> None:
    assert worlds(4).run(largest) == [([3.0, 0.0], [("all_reduce_max", 12)])] * 4
