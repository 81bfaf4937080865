"""Packed documents, found in the fields of a batch that say where documents begin and end.

B batch, S real global length.

A field that only says "one document per row" says nothing that the attention mask does not, and may go. One that says
more is refused, and so is one that contradicts the mask.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cp_collectives import InvalidInputError, UnsupportedError

# Where documents begin, and after the last one where it ends, in tokens: [0, S] for one document.
_OFFSETS = (
    "cu_seqlens",
    "cu_seqlens_unpadded",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cu_seqlens_kv",
    "cu_seq_lens",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
)
# The same with each document's pads.
_PADDED_OFFSETS = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens_k_padded", "cu_seqlens_kv_padded")
_LENGTHS = (
    "seq_lens",
    "seqlens",
    "seq_lengths",
    "sequence_lengths",
    "sub_seq_lens",
    "doc_lens",
    "doc_lengths",
    "document_lens",
)
_PADDED_LENGTHS = ("seq_lens_padded",)
# [B, S]: a number per token, the same within a document.
_NUMBERS = ("document_ids", "document_id", "doc_ids", "seq_idx", "segment_ids", "sequence_ids", "sequence_id")
_LONGEST = ("max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv")
# Objects of other libraries that are made for packed batches only.
_ALWAYS_PACKED = ("packed_seq_params", "qkv_format", "cu_seqlens_argmin", "max_doc_lens")

DOCUMENT_FIELDS = (*_OFFSETS, *_PADDED_OFFSETS, *_LENGTHS, *_PADDED_LENGTHS, *_NUMBERS, *_LONGEST, *_ALWAYS_PACKED)

_REMEDY = "packed documents are not supported in this version; give one document per row"


class _Run(NamedTuple):
    """The real tokens of one row."""

    start: int
    # One past the last; equal to `start` in a row of pads.
    stop: int


def refuse_packed_documents(batch: Mapping[str, Any], shape: tuple[int, int], real: torch.Tensor | None) -> None:
    """Refuse the fields that split a row into documents or contradict the attention mask.

    Args:
        batch: The global batch.
        shape: `(B, S)`.
        real: `[B, S]` bool, True for a real token; None if all are.

    Raises:
        UnsupportedError: Naming every field that splits a row.
        InvalidInputError: On a field of no known form, or whose one document per row is not the row's real tokens.
    """
    given = {name: batch[name] for name in DOCUMENT_FIELDS if batch.get(name) is not None}
    if not given:
        return
    rows = _runs(shape, real)
    found = [split for name, value in given.items() if (split := _split(name, value, rows, shape, real)) is not None]
    if found:
        raise UnsupportedError(f"the batch is packed ({', '.join(found)}): {_REMEDY}.")


def refuse_document_numbers(name: str, numbers: torch.Tensor, real: torch.Tensor | None) -> None:
    """Refuse numbers `[B, S]` that change between the real tokens of a row.

    Raises:
        UnsupportedError: Naming the first change.
    """
    split = _split_of_numbers(name, numbers, real)
    if split is not None:
        raise UnsupportedError(f"the batch is packed ({split}): {_REMEDY}.")


def _split(
    name: str, value: Any, rows: Sequence[_Run], shape: tuple[int, int], real: torch.Tensor | None
) -> str | None:
    """Return what in a field splits a row into documents; None if it says nothing."""
    if name in _ALWAYS_PACKED:
        return name
    if name in _LONGEST:
        return _split_of_longest(name, value, rows, shape[1])
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        raise InvalidInputError(f"{name} must be a tensor of integers, but got {_described(value)}.")
    if name in _NUMBERS:
        if tuple(value.shape) != shape:
            raise InvalidInputError(f"{name} must be [B, S] = {list(shape)}, but got {list(value.shape)}.")
        return _split_of_numbers(name, value if real is None else value.to(real.device), real)
    whole = [_Run(0, shape[1])] * shape[0]
    if name in _OFFSETS or name in _PADDED_OFFSETS:
        return _split_of_offsets(name, value, rows if name in _OFFSETS else whole)
    return _split_of_lengths(name, value, rows if name in _LENGTHS else whole)


def _split_of_numbers(name: str, numbers: torch.Tensor, real: torch.Tensor | None) -> str | None:
    changes = numbers[:, 1:] != numbers[:, :-1]
    if real is not None:
        changes = changes & real[:, 1:] & real[:, :-1]
    where = changes.nonzero()
    if not len(where):
        return None
    row, column = where[0].tolist()
    return f"{name} changes at row {row}, position {column + 1}"


def _split_of_offsets(name: str, offsets: torch.Tensor, rows: Sequence[_Run]) -> str | None:
    given = offsets.tolist() if offsets.ndim == 2 else [offsets.reshape(-1).tolist()]
    if len(given) != len(rows) or any(len(row) != 2 for row in given):
        return f"{name} {list(offsets.shape)}"
    for number, (found, run) in enumerate(zip(given, rows, strict=True)):
        if found != list(run):
            raise _contradiction(name, number, f"a document from {found[0]} to {found[1]}", run)
    return None


def _split_of_lengths(name: str, lengths: torch.Tensor, rows: Sequence[_Run]) -> str | None:
    if tuple(lengths.shape) not in ((len(rows),), (len(rows), 1)):
        return f"{name} {list(lengths.shape)}"
    for number, (found, run) in enumerate(zip(lengths.flatten().tolist(), rows, strict=True)):
        if found != run.stop - run.start:
            raise _contradiction(name, number, f"a document of {found} tokens", run)
    return None


def _split_of_longest(name: str, value: Any, rows: Sequence[_Run], global_length: int) -> str | None:
    found = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    longest = max(run.stop - run.start for run in rows)
    if isinstance(found, int) and found in (longest, global_length):
        return None
    return f"{name} is {_described(found)} where the longest row has {longest}"


def _contradiction(name: str, row: int, says: str, run: _Run) -> InvalidInputError:
    return InvalidInputError(
        f"{name} says that row {row} holds {says}, but its tokens stand at {run.start} to {run.stop} by the batch's "
        f"shape and attention_mask; make both say the same, or pass the attention_mask without {name}."
    )


def _runs(shape: tuple[int, int], real: torch.Tensor | None) -> list[_Run]:
    if real is None:
        return [_Run(0, shape[1])] * shape[0]
    starts, counts = real.int().argmax(dim=1).tolist(), real.sum(dim=1).tolist()
    return [_Run(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return str(value) if isinstance(value, (int, float)) else type(value).__name__
