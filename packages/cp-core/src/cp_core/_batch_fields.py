"""What a global batch may hold, checked and completed before anything is cut.

B batch, S real global length.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cp_collectives import InvalidInputError, UnsupportedError

from ._documents import DOCUMENT_FIELDS, refuse_packed_documents
from ._labels import global_loss_weights, global_shift_labels
from ._padding import real_tokens
from ._positions import global_positions

TOKEN_FIELDS = ("input_ids", "inputs_embeds")

# Each field the contract cuts, with the kinds of numbers it may hold.
_KINDS = {
    "input_ids": ("integers",),
    "inputs_embeds": ("floating point",),
    "labels": ("integers",),
    "shift_labels": ("integers",),
    "position_ids": ("integers",),
    "attention_mask": ("bool", "integers", "floating point"),
    "loss_weights": ("floating point",),
}
_CACHE_FIELDS = ("past_key_values", "past_key_value", "layer_past", "kv_cache", "cache", "cache_position")


def global_fields(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Check a batch and return its fields on the global sequence, labels shifted and positions made.

    `attention_mask` comes back as `[B, S]` bool, True for a real token, and only if it hides one.

    Raises:
        InvalidInputError: On a field of the wrong shape, dtype or device, or one that the contract cannot place.
        UnsupportedError: On caches, packed documents, tensors that are sharded already and masks per query.
    """
    _refuse_fields(batch)
    _refuse_tensors(batch)
    fields = {name: batch[name] for name in TOKEN_FIELDS if batch.get(name) is not None}
    shape = _shape_of(fields)
    real = None if batch.get("attention_mask") is None else real_tokens(batch["attention_mask"], shape)
    refuse_packed_documents(batch, shape, real)
    device = next(iter(fields.values())).device
    shift_labels = global_shift_labels(batch, shape, real)
    completed = {
        "shift_labels": shift_labels,
        "loss_weights": global_loss_weights(batch, shape, shift_labels),
        "position_ids": global_positions(batch.get("position_ids"), shape, real, device=device),
        "attention_mask": real,
    }
    fields |= {name: value for name, value in completed.items() if value is not None}
    return {**fields, **_passed_through(batch, shape)}


def _refuse_fields(batch: Mapping[str, Any]) -> None:
    if not isinstance(batch, Mapping):
        raise InvalidInputError(f"the batch must be a mapping of names to tensors, but got {type(batch).__name__}.")
    if "cp_layout" in batch:
        raise InvalidInputError("the batch carries a cp_layout: it was sharded before; pass the global batch once.")
    given = {name for name, value in batch.items() if value is not None}
    if given.intersection(_CACHE_FIELDS) or batch.get("use_cache"):
        raise UnsupportedError(
            "the batch carries a key/value cache (past_key_values, cache or use_cache=True): caches are for inference; "
            "drop them in training."
        )


def _refuse_tensors(batch: Mapping[str, Any]) -> None:
    """Refuse what is no plain tensor of the right kind of numbers, and tensors on different devices."""
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            _refuse_cut_or_nested(name, value)
    given = {name: batch[name] for name in _KINDS if batch.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or _kind_of(value.dtype) not in _KINDS[name]:
            found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise InvalidInputError(f"{name} must be a tensor of {' or '.join(_KINDS[name])}, but got {found}.")
    devices = {name: value.device for name, value in given.items()}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise InvalidInputError(f"the batch must be on one device, but got {found}; move it before sharding.")


def _kind_of(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating point"
    if dtype.is_complex:
        return "complex numbers"
    return "bool" if dtype == torch.bool else "integers"


def _refuse_cut_or_nested(name: str, value: torch.Tensor) -> None:
    if hasattr(value, "placements"):  # a DTensor; the import of its module would cost every rank a second
        raise UnsupportedError(
            f"{name} is a DTensor, but the batch contract cuts plain tensors; pass the global batch as full tensors."
        )
    if value.is_nested or value.layout != torch.strided:
        raise UnsupportedError(
            f"{name} is a nested or sparse tensor, but the batch contract cuts plain ones; give one document per row, "
            "padded to one length, with an attention_mask."
        )


def _shape_of(tokens: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    first = next(iter(tokens.values()), None)
    if first is None or first.ndim < 2 or first.shape[0] == 0 or first.shape[1] == 0:
        raise InvalidInputError(
            "the batch needs input_ids [B, S] or inputs_embeds [B, S, H] with B and S of at least 1."
        )
    shape = (first.shape[0], first.shape[1])
    for name, value in tokens.items():
        expected = 2 if name == "input_ids" else 3
        if value.ndim != expected or value.shape[:2] != shape:
            raise InvalidInputError(
                f"{name} must be {expected}-D and start with {list(shape)}, but got {list(value.shape)}."
            )
    return shape


def _passed_through(batch: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    """Return the other fields, which must have no dim that could be the sequence, alone or flattened with the batch."""
    checked = (*_KINDS, *DOCUMENT_FIELDS)
    others = {name: value for name, value in batch.items() if name not in checked and value is not None}
    lengths = {shape[1], shape[0] * shape[1]}
    for name, value in others.items():
        for sizes in _sizes_within(value):
            if lengths.intersection(sizes):
                raise InvalidInputError(
                    f"{name} {list(sizes)} has a dim as long as the sequence, {shape[1]}, or the whole batch, "
                    f"{shape[0] * shape[1]}, but the batch contract does not know how to cut it; known fields are "
                    f"{', '.join(_KINDS)}. What is no sequence can be given to the model beside the batch."
                )
    return others


def _sizes_within(value: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all arrays in a value, also those inside lists and mappings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _sizes_within(item)
    elif isinstance(sizes := getattr(value, "shape", None), tuple):  # a torch.Size is one, and so is numpy's shape
        yield tuple(sizes)
