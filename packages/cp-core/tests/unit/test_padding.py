"""Which tokens the attention mask of a batch makes real. One test per refusal, with its sentence.

B batch, S real global length.
"""

import re
from typing import Any

import pytest
import torch

from cp_core import InvalidInputError, UnsupportedError, shard_batch_for_cp

IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26], [31, 32, 33, 34, 35, 36]])
REAL = {
    "right": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
    "both sides": [[0, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]],
    "a row of pads": [[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]],
    "pads only": [[0] * 6] * 3,
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def real(name: str) -> torch.Tensor:
    return torch.tensor(REAL[name]).bool()


def shard(mask: Any, **fields: Any) -> dict[str, Any]:
    return shard_batch_for_cp({"input_ids": IDS, "attention_mask": mask, **fields}, None)


def additive(tokens: torch.Tensor, dtype: torch.dtype, hidden: float) -> torch.Tensor:
    return torch.zeros(tokens.shape, dtype=dtype).masked_fill(~tokens, hidden)


def assert_real(mask: torch.Tensor, tokens: torch.Tensor) -> None:
    found = shard(mask)
    assert torch.equal(found["cp_layout"].key_padding, tokens)
    assert "attention_mask" not in found


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8], ids=str)
def test_a_mask_of_zeros_and_ones_becomes_the_layouts_key_padding(name: str, dtype: torch.dtype) -> None:
    assert_real(real(name).to(dtype), real(name))


@pytest.mark.parametrize("name", [name for name in REAL if name != "pads only"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_float_mask_with_a_one_marks_real_tokens_with_it(name: str, dtype: torch.dtype) -> None:
    assert_real(real(name).to(dtype), real(name))


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_float_mask_with_what_hides_is_added_to_scores(name: str, dtype: torch.dtype) -> None:
    for hidden in (-torch.inf, torch.finfo(dtype).min):
        assert_real(additive(real(name), dtype, hidden), real(name))


@pytest.mark.parametrize("made_in", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_additive_mask_may_be_cast_after_it_was_made(made_in: torch.dtype, dtype: torch.dtype) -> None:
    assert_real(additive(real("left"), made_in, torch.finfo(made_in).min).to(dtype), real("left"))


@pytest.mark.parametrize(
    "mask",
    [torch.ones(3, 6, dtype=torch.int64), torch.ones(3, 6), torch.ones(3, 6, dtype=torch.bool)],
    ids=["int", "float", "bool"],
)
def test_a_mask_that_hides_nothing_leaves_no_key_padding(mask: torch.Tensor) -> None:
    assert shard(mask)["cp_layout"].key_padding is None


def test_the_layout_does_not_follow_later_changes_of_the_mask() -> None:
    mask = real("right")
    layout = shard(mask)["cp_layout"]
    mask.logical_not_()
    assert torch.equal(layout.key_padding, real("right"))


def test_a_number_per_row_says_one_document_per_row() -> None:
    assert shard(torch.tensor([[1], [2], [3]]).expand(3, 6))["cp_layout"].key_padding is None
    assert_real(torch.tensor([[1], [2], [3]]) * real("left"), real("left"))


def changed(value: float, dtype: torch.dtype, base: torch.Tensor | None = None) -> torch.Tensor:
    mask = (real("right") if base is None else base).to(dtype)
    mask[1, 2] = value
    return mask


VALUES = (
    "it must hold True and False, 1 and 0, or in floating point 0 for what is seen and -inf or the dtype's smallest "
    "value for what is hidden."
)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a negative integer": (
        changed(-1, torch.int64),
        InvalidInputError,
        f"attention_mask holds -1 at row 1, position 2; {VALUES}",
    ),
    "NaN": (
        changed(float("nan"), torch.float32),
        InvalidInputError,
        f"attention_mask holds nan at row 1, position 2; {VALUES}",
    ),
    "a weight": (changed(0.5, torch.float32), InvalidInputError, "attention_mask holds 0.5 at row 1, position 2; "),
    "a large negative number": (
        changed(-1e4, torch.float32, torch.zeros(3, 6)),
        InvalidInputError,
        "attention_mask holds -10000.0 at row 1, position 2; ",
    ),
    "plus infinity": (changed(torch.inf, torch.float32), InvalidInputError, "attention_mask holds inf at row 1, "),
    "ones and what hides": (
        changed(-torch.inf, torch.float32, torch.ones(3, 6)),
        InvalidInputError,
        "attention_mask holds -inf at row 1, position 2; ",
    ),
    "float zeros, which may mean both": (
        torch.zeros(3, 6),
        InvalidInputError,
        "attention_mask holds only 0 in torch.float32, which hides nothing if it is added to scores and everything if "
        "it marks real tokens with 1; pass it as bool, True for a real token, or leave it out.",
    ),
    "complex numbers": (
        torch.ones(3, 6, dtype=torch.complex64),
        InvalidInputError,
        "attention_mask must be a tensor of bool or integers or floating point, but got torch.complex64.",
    ),
    "a hole": (
        changed(0, torch.int64),
        UnsupportedError,
        "attention_mask has a hole in row 1: position 3 is real again after pads; pads are supported before and after "
        "the tokens of a row, not between them.",
    ),
    "a hole after left pads": (
        torch.tensor([[1] * 6, [1] * 6, [0, 1, 0, 1, 1, 1]]),
        UnsupportedError,
        "attention_mask has a hole in row 2: position 3 is real again after pads",
    ),
    "documents": (
        torch.tensor([[1] * 6, [1, 1, 1, 2, 2, 0], [1] * 6]),
        UnsupportedError,
        "the batch is packed (attention_mask changes at row 1, position 3): packed documents are not supported in this "
        "version; give one document per row.",
    ),
    "documents with pads between them": (
        torch.tensor([[1] * 6, [1, 1, 0, 2, 2, 2], [1] * 6]),
        UnsupportedError,
        "attention_mask has a hole in row 1: position 3 is real again after pads",
    ),
    "a shard": (
        torch.ones(3, 3),
        InvalidInputError,
        "attention_mask must be global, [B, S] = [3, 6], but got [3, 3], which is shorter than the tokens; a mask of a "
        "local shard is not accepted.",
    ),
    "longer than the tokens": (
        torch.ones(3, 8),
        InvalidInputError,
        "attention_mask must be global, [B, S] = [3, 6], but got [3, 8].",
    ),
    "another batch size": (
        torch.ones(1, 6),
        InvalidInputError,
        "attention_mask must be global, [B, S] = [3, 6], but got [1, 6].",
    ),
    "one row": (torch.ones(6), InvalidInputError, "attention_mask must be global, [B, S] = [3, 6], but got [6]."),
    "per query and head": (
        torch.ones(3, 1, 6, 6),
        UnsupportedError,
        "attention_mask [3, 1, 6, 6] is a mask per query, which is not supported in this version; pass the padding as "
        "[B, S] = [3, 6], and leave causality to the model.",
    ),
    "per query": (torch.ones(3, 6, 6), UnsupportedError, "attention_mask [3, 6, 6] is a mask per query"),
    "one per layer type": (
        {"full_attention": None},
        InvalidInputError,
        "attention_mask must be a tensor of bool or integers or floating point, but got dict.",
    ),
}


@pytest.mark.parametrize(("mask", "kind", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(mask: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match="^" + re.escape(sentence)):
        shard(mask)
