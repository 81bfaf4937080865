"""Digests stand for tensors when ranks compare batches."""

import pytest
import torch

from cp_core._digest import tensor_digest


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_equal_tensors_have_equal_digests_however_they_lie(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).view(3, 4).to(dtype)
    assert tensor_digest(tensor) == tensor_digest(tensor.t().contiguous().t())
    assert tensor_digest(tensor) == tensor_digest(tensor.clone().requires_grad_(dtype.is_floating_point))


def test_one_changed_value_changes_the_digest() -> None:
    tensor = torch.arange(1000)
    changed = tensor.clone()
    changed[-1] += 1
    assert tensor_digest(tensor) != tensor_digest(changed)


def test_shape_and_dtype_are_part_of_the_digest() -> None:
    zeros = torch.zeros(2, 3)
    others = [zeros.view(3, 2), zeros.view(6), zeros.int(), torch.zeros(0), torch.zeros(0, 3)]
    assert len({tensor_digest(tensor) for tensor in [zeros, *others]}) == 6
