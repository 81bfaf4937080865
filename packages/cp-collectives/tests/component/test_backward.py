"""What a gather gives in backward: each rank's shard gets the sum of the gradients that all ranks have for it.

C ranks, L local sequence, S = C * L, W columns of all tensors of a message.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_collectives import CollectiveTrace, all_gather_sequence, check_no_pending

SHAPES = ((2, 2, 3, 4), (1, 2, 3, 5), (3, 1, 3, 2))
WIDTHS = (16, 10, 6)
DIM, LENGTH = 2, 3


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shard(rank: int, index: int) -> torch.Tensor:
    return normal(*SHAPES[index], seed=10 * rank + index)


def weight(rank: int, index: int, num_ranks: int) -> torch.Tensor:
    shape = list(SHAPES[index])
    shape[DIM] *= num_ranks
    return normal(*shape, seed=1000 + 10 * rank + index)


def summed_gradient(index: int, num_ranks: int) -> torch.Tensor:
    """The oracle: the gradient of the sum of all ranks' `(weight * gathered ** 2).sum()` for this rank's shard."""
    gathered = torch.cat([shard(rank, index) for rank in range(num_ranks)], DIM)
    weights = sum(weight(rank, index, num_ranks) for rank in range(num_ranks))
    return (2 * weights * gathered).chunk(num_ranks, DIM)[dist.get_rank()]


def backward_of(needs_grad: tuple[bool, ...], **options: Any) -> dict[str, Any]:
    mesh = cp_mesh()
    shards = [shard(dist.get_rank(), index).requires_grad_(needed) for index, needed in enumerate(needs_grad)]
    with CollectiveTrace() as trace:
        gathered = all_gather_sequence(*shards, dim=DIM, mesh=mesh, layer="layers.0", **options)
        weights = [weight(dist.get_rank(), index, mesh.size()) for index in range(len(shards))]
        loss = sum((w * g**2).sum() for w, g in zip(weights, gathered, strict=True))
        if any(needs_grad):
            loss.backward()
    check_no_pending(where="the test")
    return {
        "output needs grad": tuple(output.requires_grad for output in gathered),
        "has grad": tuple(tensor.grad is not None for tensor in shards),
        "errors": [
            float((tensor.grad - summed_gradient(index, mesh.size())).abs().max())
            for index, tensor in enumerate(shards)
            if tensor.grad is not None
        ],
        "records": [(r.op, r.phase, r.layer, r.bytes_received) for r in trace.records],
    }


def backward_of_all_combinations() -> dict[tuple[bool, ...], dict[str, Any]]:
    return {mask: backward_of(mask) for mask in itertools.product((False, True), repeat=3)}


@pytest.mark.parametrize("cp", [2, 4])
def test_gradient_is_the_sum_over_ranks_and_frozen_tensors_do_not_travel_back(worlds: Any, cp: int) -> None:
    itemsize = 8
    for combinations in worlds(cp).run(backward_of_all_combinations):
        assert len(combinations) == 8
        for needs_grad, found in combinations.items():
            back = sum(width for width, needed in zip(WIDTHS, needs_grad, strict=True) if needed)
            forward = ("all_gather", "forward", "layers.0", (cp - 1) * LENGTH * sum(WIDTHS) * itemsize)
            backward = ("all_to_all", "backward", "layers.0", (cp - 1) * LENGTH * back * itemsize)
            assert found["output needs grad"] == needs_grad
            assert found["has grad"] == needs_grad
            assert max(found["errors"], default=0.0) <= 1e-12
            assert found["records"] == [forward, backward][: 1 + any(needs_grad)]


def backward_with_reduce_scatter() -> dict[str, Any]:
    return backward_of((True, False, True), reduction="reduce_scatter")


@pytest.mark.parametrize("cp", [2, 4])
def test_the_native_reduce_scatter_gives_the_same_gradient_and_bytes(worlds: Any, cp: int) -> None:
    for found in worlds(cp).run(backward_with_reduce_scatter):
        assert found["has grad"] == (True, False, True)
        assert max(found["errors"]) <= 1e-12
        assert found["records"][1] == ("reduce_scatter", "backward", "layers.0", (cp - 1) * LENGTH * (16 + 6) * 8)


def difference_quotients() -> float:
    """Compare backward with central differences of the global loss, all ranks in step; return the largest error."""
    mesh, step = cp_mesh(), 1e-6
    own = normal(2, 2, seed=dist.get_rank()).requires_grad_()

    def global_loss(shard: torch.Tensor) -> torch.Tensor:
        gathered, doubled = all_gather_sequence(shard, 2 * shard, dim=0, mesh=mesh)
        return (gathered.sin() * doubled.exp() * normal(2 * mesh.size(), 2, seed=77 + dist.get_rank())).sum()

    global_loss(own).backward()
    quotients = torch.zeros_like(own)
    for rank, element in itertools.product(range(mesh.size()), range(own.numel())):
        values = []
        for sign in (1, -1):
            moved = own.detach().clone()
            if rank == dist.get_rank():
                moved.view(-1)[element] += sign * step
            total = global_loss(moved)
            dist.all_reduce(total)
            values.append(total)
        if rank == dist.get_rank():
            quotients.view(-1)[element] = (values[0] - values[1]) / (2 * step)
    return float((own.grad - quotients).abs().max())


def test_gradient_equals_difference_quotients_of_the_global_loss(worlds: Any) -> None:
    assert max(worlds(2).run(difference_quotients)) <= 1e-7


LARGE_AND_SMALL = {torch.bfloat16: 256.0, torch.float16: 2048.0}  # adding 1 to it is lost in that dtype


def sixteen_bit_gradients() -> dict[torch.dtype, tuple[float, float]]:
    """Give rank 0 a gradient so large that adding 1 in 16 bits is lost; return the sum and what 16 bits would say."""
    mesh, found = cp_mesh(), {}
    for dtype, large in LARGE_AND_SMALL.items():
        own = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
        (gathered,) = all_gather_sequence(own, dim=0, mesh=mesh)
        share = large if dist.get_rank() == 0 else 1.0
        (gathered * torch.tensor(share, dtype=dtype)).sum().backward()
        narrow = torch.tensor(large, dtype=dtype)
        for _ in range(mesh.size() - 1):
            narrow = narrow + 1
        found[dtype] = (float(own.grad[0, 0]), float(narrow))
    return found


def test_16_bit_gradients_are_summed_in_fp32(worlds: Any) -> None:
    for found in worlds(4).run(sixteen_bit_gradients):
        assert found == {torch.bfloat16: (260.0, 256.0), torch.float16: (2052.0, 2048.0)}


def unused_output() -> dict[str, Any]:
    mesh = cp_mesh()
    k, v = (shard(dist.get_rank(), index).requires_grad_() for index in (0, 1))
    with CollectiveTrace() as trace:
        global_k, _ = all_gather_sequence(k, v, dim=DIM, mesh=mesh)
        global_k.sum().backward()
    return {
        "k": k.grad.unique().tolist(),
        "v": None if v.grad is None else v.grad.unique().tolist(),
        "bytes back": trace.records[1].bytes_received,
    }


def test_an_unused_output_takes_part_in_backward_with_zeros(worlds: Any) -> None:
    expected = {"k": [2.0], "v": [0.0], "bytes back": LENGTH * (16 + 10) * 8}
    assert worlds(2).run(unused_output) == [expected] * 2


def used_on_one_rank_only() -> list[float]:
    """Rank 1 uses only V, rank 0 only K: each message still matches its peer's."""
    mesh = cp_mesh()
    k, v = (shard(dist.get_rank(), index).requires_grad_() for index in (0, 1))
    gathered = all_gather_sequence(k, v, dim=DIM, mesh=mesh)
    gathered[dist.get_rank()].sum().backward()
    check_no_pending(where="the test")
    return [k.grad.unique().item(), v.grad.unique().item()]


def test_ranks_may_use_different_outputs(worlds: Any) -> None:
    assert worlds(2).run(used_on_one_rank_only) == [[1.0, 1.0]] * 2


def backward_twice() -> dict[str, Any]:
    mesh = cp_mesh()
    own = shard(dist.get_rank(), 0).requires_grad_()
    with CollectiveTrace() as trace:
        (gathered,) = all_gather_sequence(own, dim=DIM, mesh=mesh)
        loss = (gathered**2 * weight(dist.get_rank(), 0, mesh.size())).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    check_no_pending(where="the test")
    return {
        "close": torch.allclose(own.grad, 2 * summed_gradient(0, mesh.size()), rtol=0, atol=1e-12),
        "phases": [record.phase for record in trace.records],
    }


def test_a_retained_graph_goes_backward_twice(worlds: Any) -> None:
    assert worlds(2).run(backward_twice) == [{"close": True, "phases": ["forward", "backward", "backward"]}] * 2


def gradient_for_one_input() -> dict[str, Any]:
    mesh = cp_mesh()
    k, v = (shard(dist.get_rank(), index).requires_grad_() for index in (0, 1))
    global_k, global_v = all_gather_sequence(k, v, dim=DIM, mesh=mesh)
    loss = sum(
        (w * g**2).sum()
        for w, g in zip([weight(dist.get_rank(), i, mesh.size()) for i in (0, 1)], (global_k, global_v), strict=True)
    )
    (gradient,) = torch.autograd.grad(loss, [v])
    check_no_pending(where="the test")
    return {"close": torch.allclose(gradient, summed_gradient(1, mesh.size()), rtol=0, atol=1e-12), "k": k.grad is None}


def test_autograd_grad_can_ask_for_one_input(worlds: Any) -> None:
    assert worlds(2).run(gradient_for_one_input) == [{"close": True, "k": True}] * 2


def differentiate_twice() -> str:
    mesh = cp_mesh()
    own = shard(dist.get_rank(), 0).requires_grad_()
    (gathered,) = all_gather_sequence(own, dim=DIM, mesh=mesh)
    (gradient,) = torch.autograd.grad((gathered**2).sum(), [own], create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_second_derivative_is_refused_and_not_wrong(worlds: Any) -> None:
    assert all("once_differentiable" in message for message in worlds(2).run(differentiate_twice))
