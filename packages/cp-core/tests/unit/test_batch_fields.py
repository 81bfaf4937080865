"""What a global batch may hold. One test per refusal, with its sentence.

B batch, S real global length.
"""

import re
from typing import Any

import pytest
import torch

from cp_core import InvalidInputError, UnsupportedError, shard_batch_for_cp

IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])
ONES = torch.ones_like(IDS)


def shard(**fields: Any) -> dict[str, Any]:
    return shard_batch_for_cp({"input_ids": IDS, **fields}, None)


def positions(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(list(rows))


def mask(*num_real: int) -> torch.Tensor:
    return torch.tensor([[1] * num + [0] * (6 - num) for num in num_real])


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "sharded before": (
        {"cp_layout": object()},
        InvalidInputError,
        "the batch carries a cp_layout: it was sharded before; pass the global batch once.",
    ),
    "a cache": (
        {"past_key_values": object()},
        UnsupportedError,
        "the batch carries a key/value cache (past_key_values, cache or use_cache=True): caches are for inference; "
        "drop them in training.",
    ),
    "a cache under its new name": ({"cache": object()}, UnsupportedError, "the batch carries a key/value cache"),
    "a cache position": ({"cache_position": torch.arange(6)}, UnsupportedError, "the batch carries a key/value cache"),
    "use_cache": ({"use_cache": True}, UnsupportedError, "the batch carries a key/value cache"),
    "packing keys": (
        {"cu_seqlens": torch.tensor([0, 3, 6]), "document_ids": IDS},
        UnsupportedError,
        "the batch is packed (cu_seqlens, document_ids): packed documents are not supported in this version; give one "
        "document per row.",
    ),
    "packing keys of flash": (
        {"cu_seq_lens_q": torch.tensor([0, 3, 6]), "cu_seq_lens_k": torch.tensor([0, 3, 6])},
        UnsupportedError,
        "the batch is packed (cu_seq_lens_k, cu_seq_lens_q)",
    ),
    "lengths of documents": ({"seq_lens": torch.tensor([3, 3])}, UnsupportedError, "the batch is packed (seq_lens)"),
    "positions that start again": (
        {"position_ids": positions([0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2])},
        UnsupportedError,
        "position_ids do not count up by one (row 1, position 3): packed documents and left padding are not supported "
        "in this version; give one document per row.",
    ),
    "positions of left padding": (
        {"position_ids": positions([1, 1, 0, 1, 2, 3])},
        UnsupportedError,
        "position_ids do not count up by one (row 0, position 1)",
    ),
    "positions on three axes": (
        {"position_ids": torch.zeros(3, 2, 6, dtype=torch.int64)},
        UnsupportedError,
        "position_ids must be [B, S] = [2, 6] or [1, S], but got [3, 2, 6]; multi-axis positions are not supported in "
        "this version.",
    ),
    "positions of a shard": (
        {"position_ids": torch.arange(3)[None]},
        UnsupportedError,
        "position_ids must be [B, S] = [2, 6] or [1, S], but got [1, 3]",
    ),
    "left padding": (
        {"attention_mask": mask(6, 4).flip(1)},
        UnsupportedError,
        "attention_mask pads at the left or inside; only right padding is supported in this version.",
    ),
    "padding inside": (
        {"attention_mask": torch.tensor([[1, 1, 0, 0, 1, 1]] * 2)},
        UnsupportedError,
        "attention_mask pads at the left or inside",
    ),
    "document numbers in the mask": (
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]] * 2)},
        UnsupportedError,
        "attention_mask must hold 0 and 1; document numbers in it are not supported here.",
    ),
    "a mask of a shard": (
        {"attention_mask": ONES[:, :3]},
        InvalidInputError,
        "attention_mask must be global, [B, S] = [2, 6], but got [2, 3]; masks per query or of a local shard are not "
        "accepted.",
    ),
    "a mask per query": (
        {"attention_mask": torch.ones(2, 1, 6, 6)},
        InvalidInputError,
        "attention_mask must be global, [B, S] = [2, 6], but got [2, 1, 6, 6]",
    ),
    "labels on pads": (
        {"attention_mask": mask(6, 4), "labels": IDS},
        InvalidInputError,
        "labels must be -100 where attention_mask is 0: a pad predicts nothing.",
    ),
    "labels of a shard": (
        {"labels": IDS[:, :3]},
        InvalidInputError,
        "labels must be [B, S] = [2, 6], but got [2, 3].",
    ),
    "shift_labels of a shard": (
        {"shift_labels": IDS[:, :3]},
        InvalidInputError,
        "shift_labels must be [B, S] = [2, 6], but got [2, 3].",
    ),
    "labels that disagree with shift_labels": (
        {"labels": IDS, "shift_labels": IDS},
        InvalidInputError,
        "labels and shift_labels disagree: shift_labels[:, i] must be labels[:, i + 1], and -100 at the end; pass one "
        "of them.",
    ),
    "an unknown tensor with a sequence dim": (
        {"token_type_ids": IDS},
        InvalidInputError,
        "token_type_ids [2, 6] has a dim of the sequence length 6, but the batch contract does not know how to cut it; "
        "known fields are input_ids, inputs_embeds, labels, shift_labels, position_ids, attention_mask.",
    ),
    "embeddings of another length": (
        {"inputs_embeds": torch.zeros(2, 5, 4)},
        InvalidInputError,
        "inputs_embeds must be 3-D and start with [2, 6], but got [2, 5, 4].",
    ),
}


@pytest.mark.parametrize(("fields", "kind", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(fields: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match="^" + re.escape(sentence)):
        shard(**fields)


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"labels": IDS},
        {"input_ids": None},
        {"input_ids": IDS[0]},
        {"input_ids": IDS[:, :0]},
        {"input_ids": [[1, 2]]},
    ],
    ids=["nothing", "labels only", "None", "1-D", "no token", "a list"],
)
def test_a_batch_without_tokens_is_refused(batch: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"^the batch needs input_ids \[B, S\] or inputs_embeds \[B, S, H\]"):
        shard_batch_for_cp(batch, None)


def test_what_is_no_mapping_is_refused_with_its_type() -> None:
    with pytest.raises(InvalidInputError, match="must be a mapping of names to tensors, but got Tensor"):
        shard_batch_for_cp(IDS, None)  # type: ignore[arg-type]


def test_ids_must_be_two_dimensional() -> None:
    with pytest.raises(InvalidInputError, match=r"input_ids must be 2-D and start with \[2, 6\], but got \[2, 6, 1\]"):
        shard_batch_for_cp({"input_ids": IDS[..., None]}, None)


def test_a_label_on_the_only_pad_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="a pad predicts nothing"):
        shard(attention_mask=mask(6, 5), labels=IDS)


def test_labels_are_shifted_and_the_last_has_no_target() -> None:
    assert shard(labels=IDS)["shift_labels"].tolist() == [[12, 13, 14, 15, 16, -100], [22, 23, 24, 25, 26, -100]]


def test_shift_labels_are_taken_as_they_are() -> None:
    assert torch.equal(shard(shift_labels=IDS)["shift_labels"], IDS)


def test_labels_and_shift_labels_that_agree_are_taken() -> None:
    shifted = shard(labels=IDS)["shift_labels"]
    assert torch.equal(shard(labels=IDS, shift_labels=shifted)["shift_labels"], shifted)


def test_without_labels_there_are_none() -> None:
    assert "shift_labels" not in shard()


@pytest.mark.parametrize(
    "given", [None, torch.arange(6)[None], torch.arange(6).expand(2, 6)], ids=["made", "[1, S]", "[B, S]"]
)
def test_positions_are_per_row_and_count_from_where_they_start(given: torch.Tensor | None) -> None:
    assert shard(position_ids=given)["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_positions_may_start_later() -> None:
    given = torch.arange(6)[None] + torch.tensor([[3], [100]])
    assert torch.equal(shard(position_ids=given)["position_ids"], given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_right_padding_becomes_the_layouts_key_padding(dtype: torch.dtype) -> None:
    found = shard(attention_mask=mask(6, 4).to(dtype))
    assert torch.equal(found["cp_layout"].key_padding, mask(6, 4).bool())
    assert "attention_mask" not in found


def test_a_mask_that_masks_nothing_leaves_no_key_padding() -> None:
    assert shard(attention_mask=ONES)["cp_layout"].key_padding is None


def test_embeddings_may_stand_for_ids() -> None:
    embeds = torch.randn(2, 6, 4)
    found = shard_batch_for_cp({"inputs_embeds": embeds}, None)
    assert torch.equal(found["inputs_embeds"], embeds)
    assert "input_ids" not in found


def test_what_has_no_sequence_dim_passes_as_it_is() -> None:
    image, name = torch.zeros(2, 3), object()
    found = shard(image_sizes=image, name=name, nothing=None, use_cache=False, past_key_values=None)
    assert found["image_sizes"] is image
    assert found["name"] is name
    assert found["use_cache"] is False
    assert "nothing" not in found
    assert "past_key_values" not in found
