"""Gradients and their norm over ranks, whatever mesh a parameter lies on."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cp_core import InvalidInputError, clip_grad_norm, sum_gradients

MAX_NORM = 0.5


def square_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))


def values(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def norm_of_mixed_meshes(norm_type: float) -> dict[str, Any]:
    mesh = square_mesh()
    placements: list[tuple[DeviceMesh, list[Any]] | None] = [
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [Shard(0), Replicate()]),
        (mesh["tp"], [Shard(0)]),
        (mesh["tp"], [Replicate()]),
        (mesh["shard"], [Shard(0)]),  # one row: the second rank holds nothing
        None,
    ]
    wholes = values((7, 5), (3, 4), (4, 2), (3,), (1, 6), (5,))
    alone = [torch.nn.Parameter(whole.clone()) for whole in wholes]
    for param in alone:
        param.grad = 2 * param.detach()
    placed = []
    for whole, placement in zip(wholes, placements, strict=True):
        here = whole if placement is None else distribute_tensor(whole, *placement)
        param = torch.nn.Parameter(here.clone())
        param.grad = 2 * param.detach()
        placed.append(param)
    expected = torch.nn.utils.clip_grad_norm_(alone, MAX_NORM, norm_type=norm_type)
    found = clip_grad_norm(placed, MAX_NORM, norm_type=norm_type)
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in placed]
    return {
        "norm": abs(found.item() / expected.item() - 1),
        "gradients": max((g - p.grad).abs().max().item() for g, p in zip(gradients, alone, strict=True)),
        "shape": tuple(found.shape),
    }


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_the_norm_over_several_meshes_is_that_of_one_process(worlds: Any, norm_type: float) -> None:
    for found in worlds(4).run(norm_of_mixed_meshes, norm_type):
        assert found["norm"] < 1e-14
        assert found["gradients"] < 1e-14
        assert found["shape"] == ()


def norm_where_one_rank_lacks_a_gradient() -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    if dist.get_rank() == 0:
        param.grad = param.detach().clone()
    return clip_grad_norm([param], math.inf).item()


def test_a_rank_without_a_gradient_takes_part_in_the_norm(worlds: Any) -> None:
    assert worlds(2).run(norm_where_one_rank_lacks_a_gradient) == [pytest.approx(math.sqrt(2))] * 2


def norm_of_a_partial_sum() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(InvalidInputError) as caught:
        clip_grad_norm([param], 1.0)
    return str(caught.value)


def test_a_partial_sum_has_no_norm(worlds: Any) -> None:
    for message in worlds(2).run(norm_of_a_partial_sum):
        assert message.startswith("clip_grad_norm: parameter 0 is placed ")
        assert "call sum_gradients first." in message


def sum_beside_tensor_parallel() -> dict[str, Any]:
    mesh = square_mesh()
    rank, tp = mesh.get_local_rank("shard"), mesh["tp"]
    sharded = torch.nn.Parameter(distribute_tensor(torch.zeros(4), tp, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.arange(4.0) + 10 * rank, tp, [Shard(0)])
    fed_by_shards = torch.nn.Parameter(distribute_tensor(torch.zeros(2), tp, [Replicate()]))
    fed_by_shards.grad = DTensor.from_local(torch.full((2,), 1.0 + mesh.get_rank()), tp, [Partial()])
    sum_gradients([sharded, fed_by_shards], mesh["shard"])
    assert isinstance(sharded.grad, DTensor)
    assert isinstance(fed_by_shards.grad, DTensor)
    return {
        "sharded": sharded.grad.full_tensor().tolist(),
        "partial": fed_by_shards.grad.to_local().tolist(),
        "placements": fed_by_shards.grad.placements == (Replicate(),),
    }


def test_tensor_parallel_gradients_are_summed_shard_by_shard(worlds: Any) -> None:
    for found in worlds(4).run(sum_beside_tensor_parallel):
        assert found == {"sharded": [10.0, 12.0, 14.0, 16.0], "partial": [10.0, 10.0], "placements": True}


def settle_on_one_data_rank() -> list[float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.ones(1), mesh, [Partial()])
    sum_gradients([param], None)
    assert isinstance(param.grad, DTensor)
    result: list[float] = param.grad.to_local().tolist()
    return result


def test_a_partial_sum_is_settled_without_data_parallel_ranks_too(worlds: Any) -> None:
    assert worlds(2).run(settle_on_one_data_rank) == [[2.0], [2.0]]


def sum_what_fsdp_has_summed() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    with pytest.raises(InvalidInputError) as caught:
        sum_gradients([param], mesh)
    return str(caught.value)


def test_a_gradient_that_fsdp_has_summed_is_not_summed_again(worlds: Any) -> None:
    for message in worlds(2).run(sum_what_fsdp_has_summed):
        assert message == (
            "sum_gradients: parameter 0 is a DTensor over the same ranks [0, 1] whose gradients are to be summed, so "
            "FSDP has summed its gradient; pass the other parameters only."
        )
