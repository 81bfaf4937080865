"""Positions are made, checked and completed. One test per refusal, with its sentence.

B batch, S real global length.
"""

import re
from typing import Any

import pytest
import torch

from cp_core import InvalidInputError, UnsupportedError, shard_batch_for_cp

IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])
NO_MASK = [[1] * 6] * 2


def positions_of(mask: list[list[int]], given: torch.Tensor | None, **options: Any) -> list[list[int]]:
    batch = {"input_ids": IDS, "attention_mask": torch.tensor(mask), "position_ids": given}
    found = shard_batch_for_cp(batch, None, **options)["position_ids"]
    assert found.dtype == torch.int64
    assert found.is_contiguous()
    positions: list[list[int]] = found.tolist()
    return positions


@pytest.mark.parametrize(
    "given",
    [
        None,
        torch.arange(6)[None],
        torch.arange(6).expand(2, 6),
        torch.arange(6, dtype=torch.int32)[None],
        torch.arange(6, dtype=torch.uint8)[None],
    ],
    ids=["made", "[1, S]", "[B, S]", "int32", "uint8"],
)
def test_positions_are_per_row_and_count_from_where_they_start(given: torch.Tensor | None) -> None:
    assert positions_of(NO_MASK, given) == [[0, 1, 2, 3, 4, 5]] * 2


def test_positions_may_start_later() -> None:
    given = torch.arange(6)[None] + torch.tensor([[3], [100]])
    assert positions_of(NO_MASK, given) == given.tolist()


def test_positions_that_are_made_count_pads_as_models_do() -> None:
    assert positions_of([[0, 0, 1, 1, 1, 0], [0] * 6], None) == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize(
    ("mask", "given", "returned"),
    [
        ([1, 1, 1, 1, 0, 0], [0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 4, 5]),
        ([1, 1, 1, 1, 0, 0], [7, 8, 9, 10, -1, 9000], [7, 8, 9, 10, 11, 12]),
        ([0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3]),
        ([0, 0, 1, 1, 1, 1], [-1, -1, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3]),
        ([0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3]),
        ([0, 0, 1, 1, 1, 1], [0, 0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ([0, 0, 1, 1, 1, 0], [0, 0, 9, 10, 11, 0], [7, 8, 9, 10, 11, 12]),
        ([0, 0, 0, 0, 0, 0], [5, 5, -5, 5, 5, 5], [0, 1, 2, 3, 4, 5]),
        ([0, 0, 1, 0, 0, 0], [1, 1, 4, 1, 1, 1], [2, 3, 4, 5, 6, 7]),
    ],
    ids=[
        "right pads at 0",
        "right pads anywhere",
        "left pads at 1",
        "left pads at -1",
        "left pads at 0, tokens from 1",
        "tokens at their place in the row",
        "both sides",
        "pads only",
        "one token",
    ],
)
def test_pads_get_the_positions_that_go_on_counting(mask: list[int], given: list[int], returned: list[int]) -> None:
    assert positions_of([mask, [1] * 6], torch.tensor([given, [0, 1, 2, 3, 4, 5]])) == [returned, [0, 1, 2, 3, 4, 5]]


def test_one_row_of_positions_is_completed_for_each_mask() -> None:
    mask = [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert positions_of(mask, torch.arange(6)[None]) == [[0, 1, 2, 3, 4, 5]] * 2


def test_positions_go_on_counting_over_the_pads_of_the_layout() -> None:
    given = torch.tensor([[0, 1, 2, 3, 0, 0], [0, 0, 0, 1, 2, 3]])
    found = positions_of([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]], given, multiple_of=8)
    assert found == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 2, 3, 4, 5]]


LEFT = [[1] * 6, [0, 0, 1, 1, 1, 1]]
COUNTING = list(range(6))
REFUSED: dict[str, tuple[list[list[int]], torch.Tensor, type[Exception], str]] = {
    "a second document": (
        NO_MASK,
        torch.tensor([COUNTING, [0, 1, 2, 0, 1, 2]]),
        UnsupportedError,
        "position_ids start again, 2 and then 0 (row 1, position 3): packed documents are not supported in this "
        "version; give one document per row, and an attention_mask where there are pads.",
    ),
    "a second document where uint8 would go on counting": (
        NO_MASK,
        torch.tensor([[253, 254, 255, 0, 1, 2]], dtype=torch.uint8),
        UnsupportedError,
        "position_ids start again, 255 and then 0 (row 0, position 3)",
    ),
    "left pads without a mask": (
        NO_MASK,
        torch.tensor([[1, 1, 0, 1, 2, 3]]),
        UnsupportedError,
        "position_ids start again, 1 and then 1 (row 0, position 1)",
    ),
    "right pads without a mask": (
        NO_MASK,
        torch.tensor([[0, 1, 2, 3, 0, 0]]),
        UnsupportedError,
        "position_ids start again, 3 and then 0 (row 0, position 4)",
    ),
    "a second document after left pads": (
        LEFT,
        torch.tensor([COUNTING, [0, 0, 0, 1, 0, 1]]),
        UnsupportedError,
        "position_ids start again, 1 and then 0 (row 1, position 4)",
    ),
    "a shard in zigzag": (
        NO_MASK,
        torch.tensor([[0, 1, 2, 9, 10, 11]]),
        InvalidInputError,
        "position_ids jump from 2 to 9 (row 0, position 3); over the real tokens of a row they must count up by one: "
        "pass those of the whole sequence in its own order, or none.",
    ),
    "a negative position": (
        LEFT,
        torch.tensor([COUNTING, [0, 0, -1, 0, 1, 2]]),
        InvalidInputError,
        "position_ids must not be negative, but row 1 has -1 at position 2.",
    ),
    "a negative position without pads": (
        NO_MASK,
        torch.arange(6)[None] - 2,
        InvalidInputError,
        "position_ids must not be negative, but row 0 has -2 at position 0.",
    ),
    "three axes": (
        NO_MASK,
        torch.zeros(3, 2, 6, dtype=torch.int64),
        UnsupportedError,
        "position_ids must be [B, S] = [2, 6] or [1, S], but got [3, 2, 6]; multi-axis positions are not supported in "
        "this version.",
    ),
    "a shard": (
        NO_MASK,
        torch.arange(3)[None],
        UnsupportedError,
        "position_ids must be [B, S] = [2, 6] or [1, S], but got [1, 3]",
    ),
    "another batch size": (
        NO_MASK,
        torch.arange(6).expand(3, 6),
        UnsupportedError,
        "position_ids must be [B, S] = [2, 6] or [1, S], but got [3, 6]",
    ),
    "one row without a batch": (
        NO_MASK,
        torch.arange(6),
        UnsupportedError,
        "position_ids must be [B, S] = [2, 6] or [1, S], but got [6]",
    ),
    "floating point": (
        NO_MASK,
        torch.arange(6.0)[None],
        InvalidInputError,
        "position_ids must be a tensor of integers, but got torch.float32.",
    ),
}


@pytest.mark.parametrize(("mask", "given", "kind", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(mask: list[list[int]], given: torch.Tensor, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match="^" + re.escape(sentence)):
        positions_of(mask, given)
