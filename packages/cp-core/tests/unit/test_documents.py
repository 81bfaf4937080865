"""Packed documents are found in the data. One test per refusal, with its sentence.

B batch, S real global length.
"""

import re
from typing import Any

import pytest
import torch

from cp_core import InvalidInputError, UnsupportedError, shard_batch_for_cp

# Row 0 holds 4 tokens, then 2 pads; row 1 holds 2 pads, then 4 tokens.
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
PACKED = "packed documents are not supported in this version; give one document per row."


def shard(num_rows: int, mask: torch.Tensor | None, **fields: Any) -> dict[str, Any]:
    batch = {"input_ids": torch.arange(12).view(2, 6)[:num_rows]}
    if mask is not None:
        batch["attention_mask"] = mask[:num_rows]
    return shard_batch_for_cp({**batch, **fields}, None)


def integers(*values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


SAYS_NOTHING: dict[str, tuple[int, torch.Tensor | None, dict[str, Any]]] = {
    "offsets of one row": (1, None, {"cu_seqlens": integers(0, 6)}),
    "offsets of flash attention": (
        1,
        None,
        {
            "cu_seq_lens_q": integers(0, 6),
            "cu_seq_lens_k": integers(0, 6),
            "max_length_q": 6,
            "max_length_k": torch.tensor(6),
        },
    ),
    "offsets of a padded row": (1, MASK, {"cu_seqlens": integers(0, 4), "cu_seqlens_padded": integers(0, 6)}),
    "offsets per row": (2, MASK, {"cu_seqlens": integers([0, 4], [2, 6])}),
    "lengths": (2, None, {"seq_lens": integers(6, 6), "seq_lens_padded": integers(6, 6)}),
    "lengths in a column": (2, None, {"seq_lens": integers([6], [6])}),
    "lengths of padded rows": (2, MASK, {"seq_lens": integers(4, 4), "seq_lens_padded": integers(6, 6)}),
    "the longest row": (2, MASK, {"max_seqlen": 4}),
    "the longest row with its pads": (2, MASK, {"max_seqlen": 6}),
    "numbers": (2, None, {"document_ids": integers([1] * 6, [2] * 6), "seq_idx": torch.zeros(2, 6, dtype=torch.int64)}),
    "numbers that change at pads": (2, MASK, {"segment_ids": integers([3, 3, 3, 3, 0, 0], [0, 0, 5, 5, 5, 5])}),
}


@pytest.mark.parametrize(("num_rows", "mask", "fields"), SAYS_NOTHING.values(), ids=SAYS_NOTHING.keys())
def test_one_document_per_row_says_nothing(num_rows: int, mask: torch.Tensor | None, fields: dict[str, Any]) -> None:
    found = shard(num_rows, mask, **fields)
    assert set(found) == {"input_ids", "position_ids", "cp_layout"}


REFUSED: dict[str, tuple[int, torch.Tensor | None, dict[str, Any], type[Exception], str]] = {
    "offsets and numbers": (
        1,
        None,
        {"cu_seqlens": integers(0, 3, 6), "document_ids": integers([0, 0, 0, 1, 1, 1])},
        UnsupportedError,
        f"the batch is packed (cu_seqlens [3], document_ids changes at row 0, position 3): {PACKED}",
    ),
    "offsets of flash attention": (
        1,
        None,
        {"cu_seq_lens_q": integers(0, 3, 6), "cu_seq_lens_k": integers(0, 3, 6), "max_length_q": 3},
        UnsupportedError,
        "the batch is packed (cu_seq_lens_q [3], cu_seq_lens_k [3], max_length_q is 3 where the longest row has 6)",
    ),
    "offsets through the rows": (
        2,
        None,
        {"cu_seqlens": integers(0, 6, 12)},
        UnsupportedError,
        "the batch is packed (cu_seqlens [3])",
    ),
    "offsets of several documents per row": (
        2,
        None,
        {"cu_seqlens": integers([0, 3, 6], [0, 2, 6])},
        UnsupportedError,
        "the batch is packed (cu_seqlens [2, 3])",
    ),
    "offsets of one of two rows": (
        2,
        None,
        {"cu_seqlens": integers(0, 6)},
        UnsupportedError,
        "the batch is packed (cu_s",
    ),
    "offsets of more rows": (
        2,
        None,
        {"cu_seqlens": integers([0, 6], [0, 6], [0, 6])},
        UnsupportedError,
        "the batch is packed (cu_seqlens [3, 2])",
    ),
    "offsets of documents and pads": (
        1,
        MASK,
        {"cu_seqlens_padded": integers(0, 2, 6)},
        UnsupportedError,
        "the batch is packed (cu_seqlens_padded [3])",
    ),
    "lengths of two documents in one row": (
        1,
        None,
        {"seq_lens": integers(3, 3)},
        UnsupportedError,
        f"the batch is packed (seq_lens [2]): {PACKED}",
    ),
    "lengths per row": (
        2,
        None,
        {"seq_lens_padded": integers([3, 3], [2, 4])},
        UnsupportedError,
        "the batch is packed (seq_lens_padded [2, 2])",
    ),
    "lengths of two documents in the form of a row": (
        2,
        None,
        {"seq_lens": integers([6, 6])},
        UnsupportedError,
        "the batch is packed (seq_lens [1, 2])",
    ),
    "no lengths": (2, None, {"seq_lens": torch.tensor(6)}, UnsupportedError, "the batch is packed (seq_lens [])"),
    "numbers in the second row": (
        2,
        MASK,
        {"seq_idx": integers([0] * 6, [0, 0, 0, 0, 0, 1])},
        UnsupportedError,
        "the batch is packed (seq_idx changes at row 1, position 5)",
    ),
    "a longest document": (
        2,
        None,
        {"max_seqlen_q": torch.tensor([3])},
        UnsupportedError,
        "the batch is packed (max_seqlen_q is 3 where the longest row has 6)",
    ),
    "several longest documents": (
        2,
        None,
        {"max_seqlen_q": integers(6, 6)},
        UnsupportedError,
        "the batch is packed (max_seqlen_q is torch.int32 [2] where the longest row has 6)",
    ),
    "parameters of another library": (
        2,
        None,
        {"packed_seq_params": object()},
        UnsupportedError,
        f"the batch is packed (packed_seq_params): {PACKED}",
    ),
    "a form of another library": (2, None, {"qkv_format": "thd"}, UnsupportedError, "the batch is packed (qkv_format)"),
    "offsets that end early": (
        1,
        None,
        {"cu_seqlens": integers(0, 4)},
        InvalidInputError,
        "cu_seqlens says that row 0 holds a document from 0 to 4, but its tokens stand at 0 to 6 by the batch's shape "
        "and attention_mask; make both say the same, or pass the attention_mask without cu_seqlens.",
    ),
    "offsets over pads": (
        1,
        MASK,
        {"cu_seqlens": integers(0, 6)},
        InvalidInputError,
        "cu_seqlens says that row 0 holds a document from 0 to 6, but its tokens stand at 0 to 4",
    ),
    "offsets without left pads": (
        2,
        MASK,
        {"cu_seqlens": integers([0, 4], [0, 4])},
        InvalidInputError,
        "cu_seqlens says that row 1 holds a document from 0 to 4, but its tokens stand at 2 to 6",
    ),
    "offsets that begin too early": (
        2,
        MASK,
        {"cu_seqlens": integers([0, 4], [1, 6])},
        InvalidInputError,
        "cu_seqlens says that row 1 holds a document from 1 to 6, but its tokens stand at 2 to 6",
    ),
    "padded offsets that end early": (
        1,
        MASK,
        {"cu_seqlens_padded": integers(0, 4)},
        InvalidInputError,
        "cu_seqlens_padded says that row 0 holds a document from 0 to 4, but its tokens stand at 0 to 6",
    ),
    "lengths without a mask": (
        2,
        None,
        {"seq_lens": integers(6, 4)},
        InvalidInputError,
        "seq_lens says that row 1 holds a document of 4 tokens, but its tokens stand at 0 to 6",
    ),
    "lengths over pads": (
        2,
        MASK,
        {"seq_lens": integers(6, 4)},
        InvalidInputError,
        "seq_lens says that row 0 holds a document of 6 tokens, but its tokens stand at 0 to 4",
    ),
    "padded lengths that are the real ones": (
        2,
        MASK,
        {"seq_lens_padded": integers(4, 4)},
        InvalidInputError,
        "seq_lens_padded says that row 0 holds a document of 4 tokens, but its tokens stand at 0 to 6",
    ),
    "a list": (
        2,
        None,
        {"seq_lens": [6, 6]},
        InvalidInputError,
        "seq_lens must be a tensor of integers, but got list.",
    ),
    "floating point": (
        1,
        None,
        {"cu_seqlens": torch.tensor([0.0, 6.0])},
        InvalidInputError,
        "cu_seqlens must be a tensor of integers, but got torch.float32 [2].",
    ),
    "numbers of a shard": (
        2,
        None,
        {"document_ids": torch.zeros(2, 3, dtype=torch.int64)},
        InvalidInputError,
        "document_ids must be [B, S] = [2, 6], but got [2, 3].",
    ),
}


@pytest.mark.parametrize(("num_rows", "mask", "fields", "kind", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(
    num_rows: int, mask: torch.Tensor | None, fields: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match="^" + re.escape(sentence)):
        shard(num_rows, mask, **fields)


OFFSETS = ["cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"]
OFFSETS += [f"{name}_padded" for name in OFFSETS] + ["cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k"]
LENGTHS = ["seq_lens", "seqlens", "seq_lens_padded"]
NUMBERS = ["document_ids", "document_id", "doc_ids", "seq_idx", "segment_ids", "sequence_ids", "sequence_id"]
LONGEST = ["max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv"]
TWO_DOCUMENTS = [
    *((name, integers(0, 3, 6)) for name in OFFSETS),
    *((name, integers(3, 3)) for name in LENGTHS),
    *((name, integers([0, 0, 0, 1, 1, 1])) for name in NUMBERS),
    *((name, 3) for name in LONGEST),
]


@pytest.mark.parametrize(("name", "value"), TWO_DOCUMENTS, ids=[name for name, _ in TWO_DOCUMENTS])
def test_two_documents_are_found_under_every_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"^the batch is packed \({name} "):
        shard(1, None, **{name: value})
