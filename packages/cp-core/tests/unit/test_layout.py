"""Where the tokens of a rank stand.

S real global length, P padded global length, C ranks.
"""

import dataclasses

import pytest
import torch

from cp_core import Chunk, InvalidInputError, SequenceLayout


def layout(positions: list[int], *, global_length: int = 8, padded_length: int = 8) -> SequenceLayout:
    return SequenceLayout(
        global_index=torch.tensor(positions), global_length=global_length, padded_length=padded_length
    )


@pytest.mark.parametrize(
    ("positions", "chunks"),
    [
        ([0, 1, 2, 3], [(0, 4)]),
        ([4, 5, 6, 7], [(4, 8)]),
        ([0, 1, 6, 7], [(0, 2), (6, 8)]),
        ([2, 3, 4, 5], [(2, 6)]),
        ([0, 2, 4], [(0, 1), (2, 3), (4, 5)]),
        ([6, 7, 0, 1], [(6, 8), (0, 2)]),
        ([5], [(5, 6)]),
    ],
    ids=["first", "last", "zigzag, outer", "zigzag, inner", "scattered", "later run first", "one position"],
)
def test_the_index_is_read_as_runs_in_local_order(positions: list[int], chunks: list[tuple[int, int]]) -> None:
    found = layout(positions)
    assert found.chunks == tuple(Chunk(*chunk) for chunk in chunks)
    assert found.local_length == len(positions)


@pytest.mark.parametrize(
    ("global_length", "multiple_of", "cp_size", "padded_length"),
    [(8, 2, 2, 8), (7, 2, 2, 8), (9, 4, 4, 12), (1, 4, 4, 4), (6, 1, 1, 6), (6, 16, 2, 16)],
    ids=["divides", "one pad", "three pads", "one token", "one rank", "a larger multiple"],
)
def test_contiguous_shards_cover_the_padded_sequence_once(
    global_length: int, multiple_of: int, cp_size: int, padded_length: int
) -> None:
    shards = [
        SequenceLayout.contiguous(global_length=global_length, multiple_of=multiple_of, cp_size=cp_size, cp_rank=rank)
        for rank in range(cp_size)
    ]
    assert torch.cat([shard.global_index for shard in shards]).tolist() == list(range(padded_length))
    assert {(shard.global_length, shard.padded_length) for shard in shards} == {(global_length, padded_length)}
    assert all(shard.key_padding is None for shard in shards)


def test_key_padding_marks_the_pads_of_the_layout_too() -> None:
    real = torch.tensor([[True, True, True], [True, False, False]])
    found = SequenceLayout.contiguous(global_length=3, multiple_of=4, cp_size=2, cp_rank=1, real_keys=real)
    assert found.key_padding is not None
    assert found.key_padding.tolist() == [[True, True, True, False], [True, False, False, False]]


def test_the_real_tokens_of_rows_are_read_as_runs() -> None:
    rows = ["11110", "11110", "01111", "00000", "01111", "11111"]
    padding = torch.tensor([[digit == "1" for digit in row] for row in rows])
    found = SequenceLayout(global_index=torch.arange(5), global_length=5, padded_length=5, key_padding=padding)
    assert found.real_runs == (
        (slice(0, 2), (0, 4)),
        (slice(2, 3), (1, 5)),
        (slice(4, 5), (1, 5)),
        (slice(5, 6), (0, 5)),
    )
    assert layout([0, 1], global_length=7).real_runs == ((slice(None), (0, 7)),)


def test_pads_inside_a_row_are_refused_with_the_row() -> None:
    padding = torch.tensor([[True, True, True], [True, False, True]])
    with pytest.raises(InvalidInputError, match=r"with pads at its sides only, but row 1 has pads inside\."):
        SequenceLayout(global_index=torch.arange(3), global_length=3, padded_length=3, key_padding=padding)


@pytest.mark.parametrize("padding", [torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 3), torch.ones(3)], ids=str)
def test_key_padding_of_another_form_is_refused(padding: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match=r"^key_padding must be \[B, P\] bool with P = 3, but got torch\."):
        SequenceLayout(global_index=torch.arange(3), global_length=3, padded_length=3, key_padding=padding)


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([[0, 1]]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([0, 1], device="meta"),
    ],
    ids=["2-D", "int32", "empty", "not on CPU"],
)
def test_an_index_that_is_no_list_of_positions_is_refused(index: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match=r"global_index must be a non-empty \[L\] int64 tensor on CPU, but got"):
        SequenceLayout(global_index=index, global_length=2, padded_length=2)


@pytest.mark.parametrize(
    ("positions", "global_length"),
    [([6, 7, 8], 8), ([-1, 0], 8), ([0, 1], 9), ([0, 1], 0)],
    ids=["past the end", "before the start", "more real tokens than padded", "no real token"],
)
def test_positions_outside_the_padded_sequence_are_refused(positions: list[int], global_length: int) -> None:
    with pytest.raises(InvalidInputError, match=r"must lie within the padded length 8\."):
        layout(positions, global_length=global_length)


def test_a_multiple_that_does_not_divide_among_the_ranks_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        SequenceLayout.contiguous(global_length=9, multiple_of=3, cp_size=2, cp_rank=0)


def test_a_layout_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout([0, 1]).global_length = 3  # type: ignore[misc]


def test_equal_layouts_describe_the_same_shard() -> None:
    keys = torch.tensor([[True] * 6 + [False] * 2])
    base = layout([0, 1])
    padded = dataclasses.replace(base, key_padding=keys)
    assert base.equals(layout([0, 1]))
    assert padded.equals(dataclasses.replace(base, key_padding=keys.clone()))
    for other in (layout([2, 3]), layout([0, 1], global_length=7), layout([0, 1], padded_length=10), padded):
        assert not base.equals(other)
    assert not padded.equals(dataclasses.replace(base, key_padding=~keys))
    assert not base.equals(dataclasses.replace(base, document_bounds=torch.zeros(1, 8, dtype=torch.int64)))
