"""Several tensors in the columns of one buffer.

L sequence, W columns.
"""

import pytest
import torch

from cp_collectives import InvalidInputError
from cp_collectives._packing import SequencePacking

SHAPES = {
    "one at dim 0": ([(4, 3)], 0),
    "k and v at dim 2": ([(2, 3, 4, 5), (2, 3, 4, 5)], 2),
    "different widths": ([(1, 4, 5), (2, 4), (2, 4, 1, 2)], 1),
    "negative dim, different ranks": ([(2, 5, 4), (3, 4), (4,)], -1),
    "sequence of one": ([(2, 3, 1, 5), (2, 1, 1, 5)], 2),
}


def numbered(shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@pytest.mark.parametrize(("shapes", "dim"), SHAPES.values(), ids=SHAPES.keys())
def test_unpack_gives_back_what_pack_took(shapes: list[tuple[int, ...]], dim: int) -> None:
    tensors = [numbered(shape, 100 * index) for index, shape in enumerate(shapes)]
    packing = SequencePacking.of(tensors, dim)
    buffer = packing.pack(tensors)
    assert buffer.shape == (tensors[0].shape[dim], sum(packing.widths))
    assert buffer.is_contiguous()
    for tensor, back in zip(tensors, packing.unpack(buffer), strict=True):
        assert torch.equal(tensor, back)


def test_rows_are_positions_and_columns_are_tensors_in_order() -> None:
    k, v = torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]]), torch.tensor([[[[10.0, 11.0], [12.0, 13.0]]]])
    buffer = SequencePacking.of((k, v), 2).pack((k, v))
    assert buffer.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_widths_are_everything_but_the_sequence() -> None:
    tensors = [torch.zeros(2, 3, 4, 5), torch.zeros(1, 2, 4, 7)]
    assert SequencePacking.of(tensors, 2).widths == (30, 14)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_non_contiguous_tensors_are_packed_by_value(dim: int) -> None:
    tensor = numbered((4, 6, 8))[:, ::2].transpose(0, 2)
    packing = SequencePacking.of((tensor, tensor), dim)
    assert all(torch.equal(tensor, back) for back in packing.unpack(packing.pack((tensor, tensor))))


def test_an_expanded_tensor_is_packed_by_value() -> None:
    tensor = torch.ones((), dtype=torch.float64).expand(4, 3)
    assert SequencePacking.of((tensor,), 0).pack((tensor,)).tolist() == [[1.0] * 3] * 4


@pytest.mark.parametrize("shape", [(4, 2, 3), (1, 4, 6)], ids=["dim 0", "all dims before it are 1"])
def test_one_tensor_that_lies_sequence_first_is_not_copied(shape: tuple[int, ...]) -> None:
    tensor = numbered(shape)
    buffer = SequencePacking.of((tensor,), shape.index(4)).pack((tensor,))
    assert buffer.data_ptr() == tensor.data_ptr()


def test_two_tensors_are_copied() -> None:
    tensor = numbered((4, 2))
    buffer = SequencePacking.of((tensor, tensor), 0).pack((tensor, tensor))
    assert buffer.data_ptr() != tensor.data_ptr()


def test_unpacked_tensors_are_views_of_the_buffer() -> None:
    tensors = [numbered((2, 4, 3)), numbered((2, 4, 5))]
    packing = SequencePacking.of(tensors, 1)
    buffer = packing.pack(tensors)
    storage = buffer.untyped_storage().data_ptr()
    assert all(back.untyped_storage().data_ptr() == storage for back in packing.unpack(buffer))


def test_a_longer_buffer_unpacks_to_longer_tensors() -> None:
    packing = SequencePacking.of([torch.zeros(2, 4, 3), torch.zeros(4, 4)], 1)
    shapes = [tuple(back.shape) for back in packing.unpack(torch.zeros(12, sum(packing.widths)))]
    assert shapes == [(2, 12, 3), (4, 12)]


def test_select_keeps_the_marked_tensors_in_order() -> None:
    tensors = [numbered((4, 2)), numbered((4, 3), 10), numbered((4, 5), 50)]
    selected = SequencePacking.of(tensors, 0).select((True, False, True))
    assert selected == SequencePacking.of([tensors[0], tensors[2]], 0)


def test_no_tensor_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"a collective needs at least one tensor, but got none\."):
        SequencePacking.of((), 0)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_outside_the_tensor_is_refused(dim: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"dim {dim} is not a dim of a tensor of shape \(4, 3\)\."):
        SequencePacking.of([torch.zeros(4, 3)], dim)


def test_a_scalar_has_no_sequence() -> None:
    with pytest.raises(InvalidInputError, match=r"dim 0 is not a dim of a tensor of shape \(\)\."):
        SequencePacking.of([torch.zeros(())], 0)


def test_different_dtypes_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"share dtype and device, but got torch.float32 on cpu and torch.bfloa"
    ):
        SequencePacking.of([torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.bfloat16)], 0)


def test_different_devices_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"torch.float32 on cpu and torch.float32 on meta"):
        SequencePacking.of([torch.zeros(4, 3), torch.zeros(4, 3, device="meta")], 0)


def test_different_lengths_are_refused_with_both() -> None:
    with pytest.raises(InvalidInputError, match=r"equal length in dim 1, but got 4 and 5\."):
        SequencePacking.of([torch.zeros(2, 4), torch.zeros(2, 5)], 1)
