"""What each token of a global batch predicts, and what that weighs in the loss.

B batch, S real global length.
"""

from collections.abc import Mapping
from typing import Any

import torch

from cp_collectives import InvalidInputError

IGNORE_INDEX = -100
_LABEL_FIELDS = ("labels", "shift_labels")

_OTHER_WEIGHT_FIELDS = ("loss_mask", "loss_scale", "loss_weight", "token_weights")


def global_shift_labels(
    batch: Mapping[str, Any], shape: tuple[int, int], real: torch.Tensor | None
) -> torch.Tensor | None:
    """Return what each token predicts, shifted on the global sequence.

    A pad predicts nothing. The last pad before a row's tokens would predict the first of them; what the model says
    there depends on no real token, so it has no target, although a model of transformers given `labels` counts it.

        labels  -100 -100 a b c        shift_labels  -100 -100 b c -100

    Args:
        batch: With `labels`, `shift_labels`, both or none; both must agree.
        shape: `(B, S)`.
        real: `[B, S]` bool, True for a real token; None if all are.

    Returns:
        `[B, S]` int64; None without labels.

    Raises:
        InvalidInputError: On another shape, a label on a pad, a negative label that is not -100, and labels
            that disagree.
    """
    given: dict[str, torch.Tensor] = {name: batch[name] for name in _LABEL_FIELDS if batch.get(name) is not None}
    for name, value in given.items():
        _refuse_labels(name, value, shape)
    if not given:
        return None
    source = next(iter(given))
    if real is not None and bool((given[source][~real] != IGNORE_INDEX).any()):
        raise InvalidInputError(f"{source} must be -100 where attention_mask hides a token: a pad predicts nothing.")
    if source == "shift_labels":
        return given["shift_labels"].long()
    shifted = torch.nn.functional.pad(given["labels"][:, 1:].long(), (0, 1), value=IGNORE_INDEX)
    targets = shifted if real is None else shifted.masked_fill(~real, IGNORE_INDEX)
    if "shift_labels" in given:
        _refuse_disagreement(given["shift_labels"].long(), (shifted, targets))
    return targets


def global_loss_weights(
    batch: Mapping[str, Any], shape: tuple[int, int], shift_labels: torch.Tensor | None
) -> torch.Tensor | None:
    """Return what each token's loss weighs, in the order of the shifted labels.

    Args:
        batch: `loss_weights` `[B, S]` in floating point stand where the labels stand: beside `labels` if the batch has
            them, and then they are shifted with them, else beside `shift_labels`.
        shape: `(B, S)`.
        shift_labels: `[B, S]`, shifted.

    Returns:
        `[B, S]`, 0 where `shift_labels` is -100; None without weights.

    Raises:
        InvalidInputError: On weights under another name, without labels, of another shape, that are negative or not
            finite, or that need a gradient.
    """
    unknown = sorted(name for name in _OTHER_WEIGHT_FIELDS if batch.get(name) is not None)
    if unknown:
        raise InvalidInputError(
            f"{', '.join(unknown)} is no field of the batch contract; set labels to -100 where nothing is to learn, or "
            "pass loss_weights [B, S] in floating point that stand where the labels stand."
        )
    weights = batch.get("loss_weights")
    if weights is None:
        return None
    if shift_labels is None:
        raise InvalidInputError("loss_weights weigh the loss of labels: pass labels or shift_labels with them.")
    _refuse_weights(weights, shape)
    if batch.get("labels") is not None:
        weights = torch.nn.functional.pad(weights[:, 1:], (0, 1))
    return weights.masked_fill(shift_labels == IGNORE_INDEX, 0)


def _refuse_labels(name: str, value: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(value.shape) != shape:
        raise InvalidInputError(f"{name} must be [B, S] = {list(shape)}, but got {list(value.shape)}.")
    negative = (value < 0) & (value != IGNORE_INDEX)
    if bool(negative.any()):
        row, column = negative.nonzero()[0].tolist()
        raise InvalidInputError(
            f"{name} holds {int(value[row, column])} at row {row}, position {column}; a token that is not to be "
            "learned is marked with -100."
        )


def _refuse_disagreement(given: torch.Tensor, accepted: tuple[torch.Tensor, ...]) -> None:
    if not any(torch.equal(given, one) for one in accepted):
        raise InvalidInputError(
            "labels and shift_labels disagree: shift_labels[:, i] must be labels[:, i + 1], and -100 at the end; pass "
            "one of them."
        )


def _refuse_weights(weights: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(weights.shape) != shape:
        raise InvalidInputError(f"loss_weights must be [B, S] = {list(shape)}, but got {list(weights.shape)}.")
    if weights.requires_grad:
        raise InvalidInputError("loss_weights must not require a gradient: their sum divides the loss as a constant.")
    wrong = ~(weights.isfinite() & (weights >= 0))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise InvalidInputError(
            f"loss_weights must be finite and not negative, but row {row} has {float(weights[row, column])} at "
            f"position {column}."
        )
