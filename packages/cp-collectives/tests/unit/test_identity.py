"""Without a mesh nothing travels: one rank needs no process group."""

import pytest
import torch
import torch.distributed as dist

from cp_collectives import (
    CollectiveTrace,
    InvalidInputError,
    LifecycleError,
    PendingCollective,
    agree,
    all_gather_sequence,
    all_reduce_sum,
    check_no_pending,
    flex_cp_allgather,
    gather_objects,
    launch_all_gather,
    mesh_rank,
    mesh_size,
)


def key_and_value() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, 4, 3, requires_grad=True), torch.randn(1, 2, 4, 3)


def test_this_process_has_no_group() -> None:
    assert not dist.is_initialized()


def test_a_gather_returns_its_inputs() -> None:
    k, v = key_and_value()
    with CollectiveTrace() as trace:
        gathered = all_gather_sequence(k, v, dim=2, mesh=None)
    assert gathered[0] is k
    assert gathered[1] is v
    assert trace.records == []


def test_a_launched_gather_returns_its_inputs() -> None:
    k, v = key_and_value()
    gathered = launch_all_gather(k, v, dim=2, mesh=None, layer="layers.0").wait()
    assert gathered[0] is k
    assert gathered[1] is v


def test_flex_cp_allgather_returns_its_inputs() -> None:
    k, v = key_and_value()
    gathered = flex_cp_allgather(k, v, cp_dim=2, cp_mesh=None)
    assert gathered[0] is k
    assert gathered[1] is v


def test_arguments_are_checked_as_with_many_ranks() -> None:
    with pytest.raises(InvalidInputError, match="equal length in dim 0"):
        all_gather_sequence(torch.zeros(2), torch.zeros(3), dim=0, mesh=None)


def test_a_sum_over_ranks_is_the_value_itself() -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    all_reduce_sum(values, mesh=None)
    assert [value.tolist() for value in values] == [[1.0, 2.0], 3.0]


def test_there_is_one_rank_and_its_position_is_0() -> None:
    assert (mesh_size(None), mesh_rank(None)) == (1, 0)


def test_gathered_objects_are_ones_own() -> None:
    own = {"a": 1}
    assert gather_objects(own, mesh=None) == [own]


def test_agreeing_with_oneself_raises_ones_own_fault() -> None:
    agree(None, mesh=None)
    with pytest.raises(InvalidInputError, match=r"^S must be even\.$"):
        agree("S must be even.", mesh=None)
    with pytest.raises(LifecycleError, match=r"^waited twice\.$"):
        agree(LifecycleError("waited twice."), mesh=None)


def test_a_step_without_messages_leaves_nothing_pending() -> None:
    check_no_pending(where="step 1")


def test_a_handle_can_be_waited_for_once() -> None:
    handle = PendingCollective(lambda: (torch.zeros(1),), name="all_gather of layer 'layers.0' (invocation 1)")
    handle.wait()
    with pytest.raises(
        LifecycleError, match=r"^all_gather of layer 'layers.0' \(invocation 1\) was waited for twice; "
    ):
        handle.wait()


def test_a_launch_on_one_rank_can_be_waited_for_once() -> None:
    handle = launch_all_gather(*key_and_value(), dim=2, mesh=None)
    handle.wait()
    with pytest.raises(LifecycleError, match="was waited for twice; keep the result of the first"):
        handle.wait()
