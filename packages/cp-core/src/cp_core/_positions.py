"""Positions of the tokens in the global sequence.

B batch, S real global length.
"""

import torch

from cp_collectives import InvalidInputError, UnsupportedError


def global_positions(
    given: torch.Tensor | None, shape: tuple[int, int], real: torch.Tensor | None, *, device: torch.device
) -> torch.Tensor:
    """Check positions, or make them, and complete them over the pads.

    A pad's own position is not read; it gets the one that goes on counting from the row's real tokens, so that no jump
    looks like a packed document to the model, and 0 where that would be negative:

        attention_mask  0 0 0 1 1 1 0        given  1 1 1 0 1 2 1        returned  0 0 0 0 1 2 3

    Args:
        given: `[B, S]` or `[1, S]` integers; None counts from 0 over the whole row, pads included, as models do.
        shape: `(B, S)`.
        real: `[B, S]` bool, True for a real token; None if all are.
        device: Of positions that are made.

    Returns:
        `[B, S]` int64, none negative.

    Raises:
        InvalidInputError: If real tokens jump ahead or have a negative position, or positions are no integers.
        UnsupportedError: On another shape, and if the positions of a row's real tokens start again.
    """
    if given is None:
        return torch.arange(shape[1], device=device).expand(shape)
    if given.ndim != 2 or given.shape[1] != shape[1] or given.shape[0] not in (1, shape[0]):
        raise UnsupportedError(
            f"position_ids must be [B, S] = {list(shape)} or [1, S], but got {list(given.shape)}; multi-axis positions "
            "are not supported in this version."
        )
    positions = given.long().expand(shape)
    _refuse_negative(positions, real)
    _refuse_jumps(positions, real)
    return positions if real is None else _completed(positions, real)


def _refuse_negative(positions: torch.Tensor, real: torch.Tensor | None) -> None:
    negative = positions < 0 if real is None else (positions < 0) & real
    if bool(negative.any()):
        row, column = negative.nonzero()[0].tolist()
        raise InvalidInputError(
            f"position_ids must not be negative, but row {row} has {int(positions[row, column])} at position {column}."
        )


def _refuse_jumps(positions: torch.Tensor, real: torch.Tensor | None) -> None:
    jumps = positions.diff(dim=1) != 1
    if real is not None:
        jumps = jumps & real[:, 1:] & real[:, :-1]
    where = jumps.nonzero()
    if not len(where):
        return
    row, column = where[0].tolist()
    before, after = positions[row, column : column + 2].tolist()
    if after > before:
        raise InvalidInputError(
            f"position_ids jump from {before} to {after} (row {row}, position {column + 1}); over the real tokens of a "
            "row they must count up by one: pass those of the whole sequence in its own order, or none."
        )
    raise UnsupportedError(
        f"position_ids start again, {before} and then {after} (row {row}, position {column + 1}): packed documents are "
        "not supported in this version; give one document per row, and an attention_mask where there are pads."
    )


def _completed(positions: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    first = real.int().argmax(dim=1, keepdim=True)
    # A row of pads has no position to count from.
    offset = (positions.gather(1, first) - first) * real.any(dim=1, keepdim=True)
    return (offset + torch.arange(positions.shape[1], device=positions.device)).clamp(min=0)
