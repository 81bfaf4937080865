"""Which tokens of a global batch are real, read from its attention mask.

B batch, S real global length.
"""

from functools import reduce
from typing import Any

import torch

from cp_collectives import InvalidInputError, UnsupportedError

from ._documents import refuse_document_numbers

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def real_tokens(mask: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return which tokens are real.

    Pads stand before and after the real tokens of a row, in each row another number of them; a row may be all pads.

    Args:
        mask: `[B, S]` on the global sequence: bool; 0 and 1 of any dtype; or additive in floating point, 0 where a
            token is seen and -inf or the smallest value of a floating dtype where it is hidden. Integers above 1 are
            document numbers, and may say one document per row.
        shape: `(B, S)`.

    Returns:
        `[B, S]` bool, True for a real token; None if all are.

    Raises:
        InvalidInputError: On another shape, as a local shard's, and on values that are none of these or could be two.
        UnsupportedError: On a mask per query, pads between real tokens, and several documents in a row.
    """
    _refuse_shape(mask, shape)
    if mask.dtype == torch.bool:
        real = mask
    else:
        real = _real_floats(mask) if mask.is_floating_point() else _real_integers(mask)
    if bool(real.all()):
        return None
    _refuse_holes(real)
    return real


def _refuse_shape(mask: torch.Tensor, shape: tuple[int, int]) -> None:
    if mask.ndim > 2:
        raise UnsupportedError(
            f"attention_mask {list(mask.shape)} is a mask per query, which is not supported in this version; pass the "
            f"padding as [B, S] = {list(shape)}, and leave causality to the model."
        )
    if tuple(mask.shape) != shape:
        is_shorter = mask.ndim == 2 and mask.shape[0] == shape[0] and mask.shape[1] < shape[1]
        reason = ", which is shorter than the tokens; a mask of a local shard is not accepted" if is_shorter else ""
        raise InvalidInputError(
            f"attention_mask must be global, [B, S] = {list(shape)}, but got {list(mask.shape)}{reason}."
        )


def _real_integers(mask: torch.Tensor) -> torch.Tensor:
    negative = mask < 0
    if bool(negative.any()):
        raise _unknown_value(mask, negative)
    real = mask != 0
    refuse_document_numbers("attention_mask", mask, real)
    return real


def _real_floats(mask: torch.Tensor) -> torch.Tensor:
    zero, one = mask == 0, mask == 1
    hidden = reduce(torch.logical_or, (mask == value for value in _hidden_values(mask.dtype)))
    unknown = ~(zero | one | hidden)
    has_one, has_hidden = bool(one.any()), bool(hidden.any())
    if bool(unknown.any()) or (has_one and has_hidden):
        raise _unknown_value(mask, unknown if bool(unknown.any()) else hidden)
    if not has_one and not has_hidden:
        raise InvalidInputError(
            f"attention_mask holds only 0 in {mask.dtype}, which hides nothing if it is added to scores and everything "
            "if it marks real tokens with 1; pass it as bool, True for a real token, or leave it out."
        )
    return one if has_one else zero


def _hidden_values(dtype: torch.dtype) -> list[float]:
    """Return what hides a token in an additive mask, also after a cast from another floating dtype."""
    smallest = torch.finfo(dtype).min
    return [-torch.inf, *(value for kind in _FLOATS if (value := torch.finfo(kind).min) >= smallest)]


def _unknown_value(mask: torch.Tensor, where: torch.Tensor) -> InvalidInputError:
    row, column = where.nonzero()[0].tolist()
    value: Any = mask[row, column].item()
    return InvalidInputError(
        f"attention_mask holds {value} at row {row}, position {column}; it must hold True and False, 1 and 0, or in "
        "floating point 0 for what is seen and -inf or the dtype's smallest value for what is hidden."
    )


def _refuse_holes(real: torch.Tensor) -> None:
    begins = real.clone()
    begins[:, 1:] &= ~real[:, :-1]
    again = (begins & (begins.cumsum(dim=1) > 1)).nonzero()
    if len(again):
        row, column = again[0].tolist()
        raise UnsupportedError(
            f"attention_mask has a hole in row {row}: position {column} is real again after pads; pads are supported "
            "before and after the tokens of a row, not between them."
        )
