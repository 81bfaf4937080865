"""Which operators the sanitizer takes for readers and writers of data."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_collectives.testing._operators import accesses, is_view, uses_data

aten = torch.ops.aten


@pytest.mark.parametrize(
    "operator",
    [
        aten.view.default,
        aten.split.Tensor,
        aten.detach.default,
        aten.t_.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.record_stream.default,
    ],
    ids=str,
)
def test_views_and_factories_use_no_data(operator: Any) -> None:
    assert not uses_data(operator)


@pytest.mark.parametrize(
    "operator",
    [aten.clone.default, aten.add.out, aten.copy_.default, aten.resize_.default, aten.zeros_like.out],
    ids=str,
)
def test_copies_and_writes_use_data(operator: Any) -> None:
    assert uses_data(operator)
    assert not is_view(operator)


def written(operator: Any, *args: Any, **kwargs: Any) -> list[bool]:
    return [writes for _, writes in accesses(operator, args, kwargs)]


def test_the_schema_says_which_tensors_are_written() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert written(aten.add.Tensor, a, b) == [False, False]
    assert written(aten.add_.Tensor, a, b) == [True, False]
    assert written(aten.add.out, a, b, out=torch.ones(2)) == [False, False, True]
    assert written(aten._foreach_add_.List, [a, a], [b, b]) == [True, True, False, False]


def test_collectives_past_this_package_write_to_what_they_do_not_call_input() -> None:
    a, b = torch.ones(2), torch.ones(2)
    group = dist.ProcessGroup(0, 1)
    assert written(torch.ops.c10d._allgather_base_.default, a, b, group) == [True, False]
    assert written(torch.ops.c10d.allgather_.default, [[a, a]], [b], group) == [True, True, False]
    assert written(torch.ops.c10d.broadcast_.default, [a], group) == [True]
    assert written(torch.ops.c10d.send.default, [a], group) == [False]
