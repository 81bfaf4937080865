"""What a global batch may hold, checked and completed before anything is cut.

B batch, S real global length.
"""

from collections.abc import Mapping
from typing import Any

import torch

from cp_collectives import InvalidInputError, UnsupportedError

IGNORE_INDEX = -100
TOKEN_FIELDS = ("input_ids", "inputs_embeds")

_LABEL_FIELDS = ("labels", "shift_labels")
_KNOWN_FIELDS = (*TOKEN_FIELDS, *_LABEL_FIELDS, "position_ids", "attention_mask")
_PACKING_FIELDS = (
    "cu_seqlens",
    "cu_seq_lens",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "seq_lens",
    "seq_lens_padded",
    "seq_idx",
    "document_ids",
)
_CACHE_FIELDS = ("past_key_values", "cache", "cache_position")


def global_fields(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Check a batch and return its fields on the global sequence, labels shifted and positions made.

    Raises:
        InvalidInputError: On a field of the wrong shape, or one that the contract cannot place.
        UnsupportedError: On caches, packed documents and left padding.
    """
    _refuse_fields(batch)
    tokens = next((batch[name] for name in TOKEN_FIELDS if batch.get(name) is not None), None)
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2 or tokens.shape[1] == 0:
        raise InvalidInputError("the batch needs input_ids [B, S] or inputs_embeds [B, S, H] with S of at least 1.")
    shape = (tokens.shape[0], tokens.shape[1])
    fields = {name: batch[name] for name in TOKEN_FIELDS if batch.get(name) is not None}
    for name, value in fields.items():
        expected = 2 if name == "input_ids" else 3
        if value.ndim != expected or value.shape[:2] != shape:
            raise InvalidInputError(
                f"{name} must be {expected}-D and start with {list(shape)}, but got {list(value.shape)}."
            )
    shift_labels = _shift_labels(batch, shape)
    if shift_labels is not None:
        fields["shift_labels"] = shift_labels
    fields["position_ids"] = _positions(batch.get("position_ids"), shape, tokens.device)
    mask = _right_padding(batch.get("attention_mask"), shape, batch.get("labels"), shift_labels)
    if mask is not None:
        fields["attention_mask"] = mask
    return {**fields, **_passed_through(batch, shape[1])}


def _refuse_fields(batch: Mapping[str, Any]) -> None:
    if not isinstance(batch, Mapping):
        raise InvalidInputError(f"the batch must be a mapping of names to tensors, but got {type(batch).__name__}.")
    if "cp_layout" in batch:
        raise InvalidInputError("the batch carries a cp_layout: it was sharded before; pass the global batch once.")
    given = {name for name, value in batch.items() if value is not None}
    packing = sorted(given.intersection(_PACKING_FIELDS))
    if packing:
        raise UnsupportedError(
            f"the batch is packed ({', '.join(packing)}): packed documents are not supported in this version; give one "
            "document per row."
        )
    if given.intersection(_CACHE_FIELDS) or batch.get("use_cache"):
        raise UnsupportedError(
            "the batch carries a key/value cache (past_key_values, cache or use_cache=True): caches are for inference; "
            "drop them in training."
        )


def _shift_labels(batch: Mapping[str, Any], shape: tuple[int, int]) -> torch.Tensor | None:
    given = {name: batch[name] for name in _LABEL_FIELDS if batch.get(name) is not None}
    for name, value in given.items():
        if tuple(value.shape) != shape:
            raise InvalidInputError(f"{name} must be [B, S] = {list(shape)}, but got {list(value.shape)}.")
    if "labels" not in given:
        return given.get("shift_labels")
    labels = given["labels"]
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if "shift_labels" in given and not torch.equal(shifted, given["shift_labels"]):
        raise InvalidInputError(
            "labels and shift_labels disagree: shift_labels[:, i] must be labels[:, i + 1], and -100 at the end; pass "
            "one of them."
        )
    return shifted


def _positions(given: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    if given is None:
        return torch.arange(shape[1], device=device).expand(shape)
    if given.ndim != 2 or given.shape[1] != shape[1] or given.shape[0] not in (1, shape[0]):
        raise UnsupportedError(
            f"position_ids must be [B, S] = {list(shape)} or [1, S], but got {list(given.shape)}; multi-axis positions "
            "are not supported in this version."
        )
    jumps = (given[:, 1:] - given[:, :-1] != 1).nonzero()
    if len(jumps):
        row, column = jumps[0].tolist()
        raise UnsupportedError(
            f"position_ids do not count up by one (row {row}, position {column + 1}): packed documents and left "
            "padding are not supported in this version; give one document per row."
        )
    return given.expand(shape)


def _right_padding(
    mask: torch.Tensor | None,
    shape: tuple[int, int],
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return the mask as bool if it pads at the right, None if it masks nothing."""
    if mask is None:
        return None
    if tuple(mask.shape) != shape:
        raise InvalidInputError(
            f"attention_mask must be global, [B, S] = {list(shape)}, but got {list(mask.shape)}; masks per query or of "
            "a local shard are not accepted."
        )
    real = mask != 0
    if not mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any()):
        raise UnsupportedError("attention_mask must hold 0 and 1; document numbers in it are not supported here.")
    if bool(real.all()):
        return None
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise UnsupportedError(
            "attention_mask pads at the left or inside; only right padding is supported in this version."
        )
    for name, values in (("labels", labels), ("shift_labels", shift_labels)):
        if values is not None and bool((values[~real] != IGNORE_INDEX).any()):
            raise InvalidInputError(f"{name} must be -100 where attention_mask is 0: a pad predicts nothing.")
    return real


def _passed_through(batch: Mapping[str, Any], global_length: int) -> dict[str, Any]:
    others = {name: value for name, value in batch.items() if name not in _KNOWN_FIELDS and value is not None}
    for name, value in others.items():
        if isinstance(value, torch.Tensor) and global_length in value.shape:
            raise InvalidInputError(
                f"{name} {list(value.shape)} has a dim of the sequence length {global_length}, but the batch contract "
                f"does not know how to cut it; known fields are {', '.join(_KNOWN_FIELDS)}."
            )
    return others
