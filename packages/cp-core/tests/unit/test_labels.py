"""What each token predicts and weighs. One test per refusal, with its sentence.

B batch, S real global length.
"""

import re
from typing import Any

import pytest
import torch

from cp_core import InvalidInputError, count_valid_tokens, shard_batch_for_cp

IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])
SHIFTED = [[12, 13, 14, 15, 16, -100], [22, 23, 24, 25, 26, -100]]
# Row 0 holds 4 tokens, then 2 pads; row 1 holds 2 pads, then 4 tokens.
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
LABELS = torch.where(MASK == 1, IDS, -100)
TARGETS = torch.tensor([[12, 13, 14, -100, -100, -100], [-100, -100, 24, 25, 26, -100]])
# As a model of transformers shifts them: the last pad at the left predicts the first token.
PLAIN = torch.tensor([[12, 13, 14, -100, -100, -100], [-100, 23, 24, 25, 26, -100]])
WEIGHTS = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]])


def shard(**fields: Any) -> dict[str, Any]:
    options = {"multiple_of": fields.pop("multiple_of", 1)}
    return shard_batch_for_cp({"input_ids": IDS, **fields}, None, **options)


def test_labels_are_shifted_and_the_last_has_no_target() -> None:
    assert shard(labels=IDS)["shift_labels"].tolist() == SHIFTED


def test_shift_labels_are_taken_as_they_are() -> None:
    assert torch.equal(shard(shift_labels=IDS)["shift_labels"], IDS)


def test_labels_and_shift_labels_that_agree_are_taken() -> None:
    assert shard(labels=IDS, shift_labels=torch.tensor(SHIFTED))["shift_labels"].tolist() == SHIFTED


def test_without_labels_there_are_none() -> None:
    assert "shift_labels" not in shard()


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_leave_as_the_integers_that_a_loss_takes(name: str) -> None:
    assert shard(**{name: IDS.int()})["shift_labels"].dtype == torch.int64


def test_a_pad_predicts_nothing_not_even_the_first_token_after_it() -> None:
    found = shard(labels=LABELS, attention_mask=MASK)["shift_labels"]
    assert torch.equal(found, TARGETS)
    assert count_valid_tokens(found) == 6


@pytest.mark.parametrize("given", [PLAIN, TARGETS], ids=["as models shift", "without the pad's target"])
def test_labels_and_shift_labels_agree_whether_or_not_a_pad_has_a_target(given: torch.Tensor) -> None:
    found = shard(labels=LABELS, shift_labels=given, attention_mask=MASK)["shift_labels"]
    assert torch.equal(found, TARGETS)


def test_a_row_of_pads_predicts_nothing() -> None:
    mask = torch.tensor([[0] * 6, [1] * 6])
    labels = torch.where(mask == 1, IDS, -100)
    assert shard(labels=labels, attention_mask=mask)["shift_labels"].tolist() == [[-100] * 6, SHIFTED[1]]


def test_weights_move_with_the_labels_they_stand_beside() -> None:
    found = shard(labels=IDS, loss_weights=WEIGHTS)["loss_weights"]
    assert found.tolist() == [[2.0, 3.0, 4.0, 5.0, 6.0, 0.0], [8.0, 9.0, 10.0, 11.0, 12.0, 0.0]]


def test_weights_stay_beside_labels_that_are_shifted() -> None:
    found = shard(shift_labels=torch.tensor(SHIFTED), loss_weights=WEIGHTS)["loss_weights"]
    assert found.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0, 0.0], [7.0, 8.0, 9.0, 10.0, 11.0, 0.0]]


def test_weights_beside_both_move_with_labels() -> None:
    both = shard(labels=IDS, shift_labels=torch.tensor(SHIFTED), loss_weights=WEIGHTS)["loss_weights"]
    assert torch.equal(both, shard(labels=IDS, loss_weights=WEIGHTS)["loss_weights"])


def test_what_has_no_label_weighs_nothing() -> None:
    labels = LABELS.clone()
    labels[0, 2] = -100
    found = shard(labels=labels, attention_mask=MASK, loss_weights=WEIGHTS, multiple_of=8)["loss_weights"]
    assert found.tolist() == [[2.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 10.0, 11.0, 12.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_keep_their_dtype(dtype: torch.dtype) -> None:
    found = shard(labels=IDS, loss_weights=WEIGHTS.to(dtype))["loss_weights"]
    assert found.dtype == dtype
    assert found.is_contiguous()


def changed(row: int, column: int, value: float, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row, column] = value
    return tensor


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "labels of a shard": ({"labels": IDS[:, :3]}, "labels must be [B, S] = [2, 6], but got [2, 3]."),
    "shift_labels of a shard": ({"shift_labels": IDS[:, :3]}, "shift_labels must be [B, S] = [2, 6], but got [2, 3]."),
    "labels in floating point": (
        {"labels": IDS.float()},
        "labels must be a tensor of integers, but got torch.float32.",
    ),
    "labels in a list": ({"shift_labels": IDS.tolist()}, "shift_labels must be a tensor of integers, but got list."),
    "another number for what is ignored": (
        {"labels": changed(1, 3, -1, IDS)},
        "labels holds -1 at row 1, position 3; a token that is not to be learned is marked with -100.",
    ),
    "labels on right pads": (
        {"attention_mask": MASK, "labels": changed(0, 5, 7, LABELS)},
        "labels must be -100 where attention_mask hides a token: a pad predicts nothing.",
    ),
    "labels on left pads": (
        {"attention_mask": MASK, "labels": changed(1, 1, 7, LABELS)},
        "labels must be -100 where attention_mask hides a token: a pad predicts nothing.",
    ),
    "shift_labels on right pads": (
        {"attention_mask": MASK, "shift_labels": changed(0, 4, 7, TARGETS)},
        "shift_labels must be -100 where attention_mask hides a token: a pad predicts nothing.",
    ),
    "shift_labels on left pads": (
        {"attention_mask": MASK, "shift_labels": PLAIN},
        "shift_labels must be -100 where attention_mask hides a token: a pad predicts nothing.",
    ),
    "labels that disagree with shift_labels": (
        {"labels": IDS, "shift_labels": IDS},
        "labels and shift_labels disagree: shift_labels[:, i] must be labels[:, i + 1], and -100 at the end; pass one "
        "of them.",
    ),
    "other targets on pads": (
        {"attention_mask": MASK, "labels": LABELS, "shift_labels": changed(1, 1, 7, PLAIN)},
        "labels and shift_labels disagree: ",
    ),
    "weights without labels": (
        {"loss_weights": WEIGHTS},
        "loss_weights weigh the loss of labels: pass labels or shift_labels with them.",
    ),
    "weights of a shard": (
        {"labels": IDS, "loss_weights": WEIGHTS[:, :3]},
        "loss_weights must be [B, S] = [2, 6], but got [2, 3].",
    ),
    "weights in integers": (
        {"labels": IDS, "loss_weights": IDS},
        "loss_weights must be a tensor of floating point, but got torch.int64.",
    ),
    "weights with a gradient": (
        {"labels": IDS, "loss_weights": WEIGHTS.clone().requires_grad_()},
        "loss_weights must not require a gradient: their sum divides the loss as a constant.",
    ),
    "negative weights": (
        {"labels": IDS, "loss_weights": changed(1, 2, -0.5, WEIGHTS)},
        "loss_weights must be finite and not negative, but row 1 has -0.5 at position 2.",
    ),
    "NaN": (
        {"labels": IDS, "loss_weights": changed(0, 0, float("nan"), WEIGHTS)},
        "loss_weights must be finite and not negative, but row 0 has nan at position 0.",
    ),
    "infinite weights": (
        {"labels": IDS, "loss_weights": changed(0, 1, float("inf"), WEIGHTS)},
        "loss_weights must be finite and not negative, but row 0 has inf at position 1.",
    ),
    **{
        name: (
            {"labels": IDS, name: WEIGHTS},
            f"{name} is no field of the batch contract; set labels to -100 where nothing is to learn, or pass "
            "loss_weights [B, S] in floating point that stand where the labels stand.",
        )
        for name in ("loss_mask", "loss_scale", "loss_weight", "token_weights")
    },
}


@pytest.mark.parametrize(("fields", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match="^" + re.escape(sentence)):
        shard(**fields)
