"""What a gather gives in forward: every rank's values, in rank order, on all ranks.

L local sequence, S = C * L.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_collectives import (
    CollectiveTrace,
    InvalidInputError,
    all_gather_sequence,
    flex_cp_allgather,
    launch_all_gather,
    mesh_rank,
    mesh_size,
)

CASES = {
    "one tensor, sequence first": ([(3, 4)], 0),
    "k and v": ([(2, 2, 3, 4), (2, 2, 3, 4)], 2),
    "three widths": ([(1, 3, 5), (2, 3), (2, 3, 1, 2)], 1),
    "last dim": ([(2, 5, 3), (4, 3)], -1),
    "one position": ([(1, 2, 1, 4), (1, 2, 1, 4)], 2),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def wrong_cases() -> list[str]:
    """Gather every case in every dtype; return the names of those that came back wrong."""
    mesh, wrong = cp_mesh(), []
    for name, (shapes, dim) in CASES.items():
        for dtype in DTYPES:
            local = [data(dist.get_rank(), shape, dtype) for shape in shapes]
            gathered = all_gather_sequence(*local, dim=dim, mesh=mesh)
            expected = [torch.cat([data(rank, s, dtype) for rank in range(mesh.size())], dim=dim) for s in shapes]
            if not all(torch.equal(found, wanted) for found, wanted in zip(gathered, expected, strict=True)):
                wrong.append(f"{name} {dtype}")
    return wrong


@pytest.mark.parametrize("cp", [2, 4])
def test_values_arrive_in_rank_order(worlds: Any, cp: int) -> None:
    assert worlds(cp).run(wrong_cases) == [[]] * cp


@pytest.mark.full
def test_values_arrive_in_rank_order_on_three_ranks(worlds: Any) -> None:
    assert worlds(3).run(wrong_cases) == [[]] * 3


def gather_strided() -> bool:
    mesh = cp_mesh()
    local = data(dist.get_rank(), (2, 6, 4, 4), torch.float64).transpose(1, 2)[:, :, ::2]
    (found,) = all_gather_sequence(local, dim=2, mesh=mesh)
    every = [data(rank, (2, 6, 4, 4), torch.float64).transpose(1, 2)[:, :, ::2] for rank in range(mesh.size())]
    return torch.equal(found, torch.cat(every, dim=2))


def test_a_strided_tensor_is_gathered_by_value(worlds: Any) -> None:
    assert worlds(2).run(gather_strided) == [True, True]


def gather_keys_and_values() -> dict[str, Any]:
    mesh = cp_mesh()
    k, v = data(dist.get_rank(), (1, 2, 3, 4), torch.float32), data(dist.get_rank() + 9, (1, 2, 3, 4), torch.float32)
    with CollectiveTrace() as trace:
        global_k, global_v = flex_cp_allgather(k, v, cp_dim=2, cp_mesh=mesh)
    expected = [torch.cat([data(rank + add, (1, 2, 3, 4), torch.float32) for rank in (0, 1)], 2) for add in (0, 9)]
    return {
        "equal": torch.equal(global_k, expected[0]) and torch.equal(global_v, expected[1]),
        "one buffer": global_k.untyped_storage().data_ptr() == global_v.untyped_storage().data_ptr(),
        "records": [(r.op, r.group, r.dtype, r.bytes_received, r.layer, r.phase) for r in trace.records],
        "waited": [r.waited_at is not None and r.waited_at >= r.launched_at for r in trace.records],
    }


def test_keys_and_values_share_one_message_and_one_buffer(worlds: Any) -> None:
    for found in worlds(2).run(gather_keys_and_values):
        assert found == {
            "equal": True,
            "one buffer": True,
            "records": [("all_gather", "cp", torch.float32, (2 - 1) * 3 * 16 * 4, None, "forward")],
            "waited": [True],
        }


def gather_then_reuse_inputs() -> bool:
    mesh = cp_mesh()
    k, v = (data(dist.get_rank() + add, (1, 2, 3, 4), torch.float32) for add in (0, 9))
    handle = launch_all_gather(k, v, dim=2, mesh=mesh)
    k.fill_(7)
    v.fill_(7)
    expected = [torch.cat([data(rank + add, (1, 2, 3, 4), torch.float32) for rank in (0, 1)], 2) for add in (0, 9)]
    return all(torch.equal(found, wanted) for found, wanted in zip(handle.wait(), expected, strict=True))


def test_several_inputs_may_be_reused_after_the_launch(worlds: Any) -> None:
    assert worlds(2).run(gather_then_reuse_inputs) == [True, True]


def gather_on_each_axis() -> dict[str, Any]:
    """On a 2 x 2 mesh, gather the global rank along each axis."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    own = torch.tensor([dist.get_rank()])
    with CollectiveTrace() as trace:
        found = {axis: all_gather_sequence(own, dim=0, mesh=grid[axis])[0].tolist() for axis in ("dp", "cp")}
    place = {f"{axis} place": (mesh_rank(grid[axis]), mesh_size(grid[axis])) for axis in ("dp", "cp")}
    return {**found, **place, "groups": [record.group for record in trace.records]}


def test_each_axis_of_a_mesh_gathers_in_its_own_group(worlds: Any) -> None:
    for rank, found in enumerate(worlds(4).run(gather_on_each_axis)):
        row, column = divmod(rank, 2)
        assert found == {
            "dp": [column, column + 2],
            "cp": [2 * row, 2 * row + 1],
            "dp place": (row, 2),
            "cp place": (column, 2),
            "groups": ["dp", "cp"],
        }


def refuse_two_axes() -> list[str]:
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    nameless = init_device_mesh("cpu", (1, 2))
    messages = []
    for mesh in (grid, nameless):
        try:
            all_gather_sequence(torch.zeros(2), dim=0, mesh=mesh)
        except InvalidInputError as error:
            messages.append(str(error))
    return messages


def test_a_mesh_with_two_axes_is_refused_with_their_names(worlds: Any) -> None:
    for named, nameless in worlds(2).run(refuse_two_axes):
        assert named == (
            "collectives run over one mesh axis, but got a mesh with 2 axes ('dp', 'cp'); pass one axis of it, such as "
            "mesh['cp']."
        )
        assert "2 axes (1, 2)" in nameless


def gather_on_an_axis_of_one() -> dict[str, Any]:
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    own = torch.ones(2, requires_grad=True)
    with CollectiveTrace() as trace:
        (found,) = all_gather_sequence(own, dim=0, mesh=grid["cp"])
    return {"same": found is own, "size": mesh_size(grid["cp"]), "messages": len(trace.records)}


def test_an_axis_of_one_rank_is_an_identity(worlds: Any) -> None:
    assert worlds(2).run(gather_on_an_axis_of_one) == [{"same": True, "size": 1, "messages": 0}] * 2


def gather_without_axis_name() -> tuple[str, list[int]]:
    mesh = DeviceMesh("cpu", [0, 1])
    with CollectiveTrace() as trace:
        (found,) = all_gather_sequence(torch.tensor([dist.get_rank()]), dim=0, mesh=mesh)
    return trace.records[0].group, found.tolist()


def test_a_mesh_without_axis_names_is_traced_by_its_group(worlds: Any) -> None:
    for group, values in worlds(2).run(gather_without_axis_name):
        assert group
        assert values == [0, 1]
