"""The control plane: what one rank found stops all of them, in its own words."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_collectives import (
    CollectiveTrace,
    ContextParallelError,
    FailureReport,
    InvalidInputError,
    LifecycleError,
    UnsupportedError,
    agree,
    all_gather_sequence,
    gather_objects,
    gather_objects_to_first,
)
from cp_collectives.testing import RankFailed, World


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def objects_in_rank_order() -> tuple[list[Any], int]:
    mesh = cp_mesh()
    with CollectiveTrace() as trace:
        found = gather_objects({"rank": dist.get_rank(), "padding": "x" * dist.get_rank()}, mesh=mesh)
    return found, len(trace.records)


@pytest.mark.parametrize("cp", [2, 4])
def test_objects_come_in_rank_order_and_are_not_traced(worlds: Any, cp: int) -> None:
    expected = [{"rank": rank, "padding": "x" * rank} for rank in range(cp)]
    assert worlds(cp).run(objects_in_rank_order) == [(expected, 0)] * cp


def objects_on_the_first_rank() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "cp"))["cp"]
    return gather_objects_to_first({"rank": dist.get_rank(), "padding": "x" * dist.get_rank()}, mesh=mesh)


def test_objects_come_to_the_first_rank_of_a_group_alone(worlds: Any) -> None:
    expected = [{"rank": rank, "padding": "x" * rank} for rank in range(4)]
    assert worlds(4).run(objects_on_the_first_rank) == [expected[:2], [], expected[2:], []]


FAULTS: dict[str, list[Any]] = {
    "nobody": [None, None],
    "a string on rank 1": [None, "S must be even."],
    "an invalid input on rank 0": [InvalidInputError("labels are short."), None],
    "an unsupported one on rank 1": [None, UnsupportedError("no window.")],
    "a life cycle on rank 1": [None, LifecycleError("waited twice.")],
    "a foreign kind on rank 1": [None, KeyError("vocab")],
    "the same on both": [InvalidInputError("no labels."), InvalidInputError("no labels.")],
    "a different one on each": [UnsupportedError("no window."), InvalidInputError("no labels.")],
}
RAISED = {
    "nobody": None,
    "a string on rank 1": (InvalidInputError, "rank 1: S must be even."),
    "an invalid input on rank 0": (InvalidInputError, "rank 0: labels are short."),
    "an unsupported one on rank 1": (UnsupportedError, "rank 1: no window."),
    "a life cycle on rank 1": (LifecycleError, "rank 1: waited twice."),
    "a foreign kind on rank 1": (ContextParallelError, "rank 1: 'vocab'"),
    "the same on both": (InvalidInputError, "no labels."),
    "a different one on each": (UnsupportedError, "rank 0: no window.\nrank 1: no labels."),
}


def agree_on_each() -> dict[str, Any]:
    mesh, found = cp_mesh(), {}
    for name, faults in FAULTS.items():
        own = faults[dist.get_rank()]
        try:
            agree(own, mesh=mesh)
            found[name] = None
        except ContextParallelError as error:
            cause = own if isinstance(own, BaseException) else None
            found[name] = (type(error), str(error)) if error.__cause__ is cause else "the cause is lost"
    return found


def test_all_ranks_raise_what_one_found(worlds: Any) -> None:
    assert worlds(2).run(agree_on_each) == [RAISED, RAISED]


def agree_with_two_of_four() -> list[str]:
    """Ranks 1 and 3 find the same fault, on the world and then on an axis of a 2 x 2 mesh that only they are on."""
    found = []
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    for mesh in (cp_mesh(), grid["dp"]):
        try:
            agree("bad row." if dist.get_rank() % 2 else None, mesh=mesh)
            found.append("no error")
        except InvalidInputError as error:
            found.append(str(error))
    return found


def test_a_fault_is_named_with_its_ranks_and_stops_only_its_mesh(worlds: Any) -> None:
    even, odd = ["rank 1, 3: bad row.", "no error"], ["rank 1, 3: bad row.", "bad row."]
    assert worlds(4).run(agree_with_two_of_four) == [even, odd, even, odd]


class DomainError(InvalidInputError):
    """A kind of a higher layer."""


def agree_on_a_kind_of_a_kind() -> bool:
    try:
        agree(DomainError("bad key.") if dist.get_rank() else None, mesh=cp_mesh())
    except ContextParallelError as error:
        return isinstance(error, InvalidInputError)
    return False


def test_a_fault_of_a_higher_layers_kind_keeps_the_kind_it_derives_from(worlds: Any) -> None:
    assert worlds(2).run(agree_on_a_kind_of_a_kind) == [True, True]


def fail_on_rank_1(message: str) -> None:
    """Rank 1 fails and its process ends while rank 0 waits for it in a gather."""
    mesh = cp_mesh()
    all_gather_sequence(torch.zeros(2), dim=0, mesh=mesh)  # connects the ranks
    if dist.get_rank() == 1:
        try:
            with FailureReport():
                raise OSError(message)
        finally:
            os._exit(1)
    with FailureReport():
        all_gather_sequence(torch.zeros(2), dim=0, mesh=mesh)


def test_a_peer_of_a_failing_rank_shows_its_message() -> None:
    with World(2) as world, pytest.raises(RankFailed) as caught:
        world.run(fail_on_rank_1, "disk full")
    of_rank_0 = next(failure for failure in caught.value.failures if failure.rank == 0)
    assert of_rank_0.error_type == "PeerError"
    assert of_rank_0.error_message == "another rank stopped the run: rank 1: OSError: disk full"


def fail_on_both() -> str:
    """Rank 0 fails first; rank 1 fails later by itself and shows who was first."""
    try:
        with FailureReport():
            time.sleep(0.5 * dist.get_rank())
            raise OSError(f"disk {dist.get_rank()} full")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_the_first_of_two_failures_is_shown(worlds: Any) -> None:
    first, second = worlds(2).run(fail_on_both)
    assert first == "OSError: disk 0 full"
    assert second == "PeerError: another rank stopped the run: rank 0: OSError: disk 0 full"


def report_agreed_fault() -> str:
    try:
        with FailureReport():
            agree("bad batch." if dist.get_rank() else None, mesh=cp_mesh())
    except ContextParallelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_agreed_fault_is_shown_as_it_is(worlds: Any) -> None:
    assert worlds(2).run(report_agreed_fault) == ["InvalidInputError: rank 1: bad batch."] * 2


def leave_without_failure() -> str:
    with FailureReport():
        pass
    try:
        with FailureReport():
            raise SystemExit(3)
    except SystemExit as left:
        return f"exit {left.code}"


def test_leaving_is_not_a_failure(worlds: Any) -> None:
    assert worlds(2).run(leave_without_failure) == ["exit 3"] * 2


def fail_in_a_second_report() -> str:
    """A fault that all ranks agreed on and survived; then rank 1 fails for a reason of its own."""
    try:
        with FailureReport():
            time.sleep(0.5 * dist.get_rank())  # rank 0 is the first
            raise InvalidInputError("bad batch.")
    except InvalidInputError:
        dist.barrier()
    try:
        with FailureReport():
            if dist.get_rank() == 1:
                raise OSError("disk full")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_later_run_does_not_show_an_earlier_runs_failure(worlds: Any) -> None:
    assert worlds(2).run(fail_in_a_second_report) == ["no error", "OSError: disk full"]


def agree_without_a_cpu_backend() -> list[Any]:
    """On a group that has no CPU backend the control plane makes its own, once."""
    from cp_collectives._control import _control_group

    group = dist.new_group([0, 1], backend="npu:gloo")
    mesh = DeviceMesh.from_group(group, "npu", mesh_dim_names=("cp",))
    own = mesh.get_group()
    found = [gather_objects(dist.get_rank(), mesh=mesh), gather_objects(-dist.get_rank(), mesh=mesh)]
    return [*found, torch.device("cpu") in own._device_types, _control_group(own) is _control_group(own)]


def test_a_device_group_without_a_cpu_backend_gets_one_beside_it(worlds: Any) -> None:
    from cp_collectives.testing import install_npu_stand_in

    world = worlds(2, setup=install_npu_stand_in, backend="cpu:gloo,npu:gloo")
    assert world.run(agree_without_a_cpu_backend) == [[[0, 1], [0, -1], False, True]] * 2
