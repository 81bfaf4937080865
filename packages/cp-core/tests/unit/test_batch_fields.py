"""What a global batch may hold. One test per refusal, with its sentence.

B batch, S real global length.
"""

import re
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_core import InvalidInputError, UnsupportedError, shard_batch_for_cp

IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])
UNKNOWN = (
    "has a dim as long as the sequence, 6, or the whole batch, 12, but the batch contract does not know how to cut it; "
    "known fields are input_ids, inputs_embeds, labels, shift_labels, position_ids, attention_mask, loss_weights. What "
    "is no sequence can be given to the model beside the batch."
)


def shard(**fields: Any) -> dict[str, Any]:
    return shard_batch_for_cp({"input_ids": IDS, **fields}, None)


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
    "an unknown tensor with a sequence dim": (
        {"token_type_ids": IDS},
        InvalidInputError,
        f"token_type_ids [2, 6] {UNKNOWN}",
    ),
    "an unknown tensor whose last dim is as long": (
        {"features": torch.zeros(2, 3, 6)},
        InvalidInputError,
        f"features [2, 3, 6] {UNKNOWN}",
    ),
    "an unknown tensor of all tokens": (
        {"indices": torch.zeros(12, 1)},
        InvalidInputError,
        f"indices [12, 1] {UNKNOWN}",
    ),
    "an unknown tensor in a list": (
        {"features": ["text", {"states": (torch.zeros(2), torch.zeros(2, 6))}]},
        InvalidInputError,
        "features [2, 6] has a dim as long as the sequence",
    ),
    "an unknown array of another library": (
        {"features": SimpleNamespace(shape=(2, 6))},
        InvalidInputError,
        "features [2, 6] has a dim as long as the sequence",
    ),
    "embeddings of another length": (
        {"inputs_embeds": torch.zeros(2, 5, 4)},
        InvalidInputError,
        "inputs_embeds must be 3-D and start with [2, 6], but got [2, 5, 4].",
    ),
    "embeddings of another batch size": (
        {"inputs_embeds": torch.zeros(1, 6, 4)},
        InvalidInputError,
        "inputs_embeds must be 3-D and start with [2, 6], but got [1, 6, 4].",
    ),
    "embeddings of integers": (
        {"inputs_embeds": torch.zeros(2, 6, 4, dtype=torch.int64)},
        InvalidInputError,
        "inputs_embeds must be a tensor of floating point, but got torch.int64.",
    ),
    "ids in floating point": (
        {"input_ids": IDS.double()},
        InvalidInputError,
        "input_ids must be a tensor of integers, but got torch.float64.",
    ),
    "bool ids": (
        {"input_ids": IDS.bool()},
        InvalidInputError,
        "input_ids must be a tensor of integers, but got torch.bool.",
    ),
    "ids in a list": (
        {"input_ids": IDS.tolist()},
        InvalidInputError,
        "input_ids must be a tensor of integers, but got list.",
    ),
    "a mask on another device": (
        {"attention_mask": torch.ones(2, 6, device="meta")},
        InvalidInputError,
        "the batch must be on one device, but got input_ids on cpu, attention_mask on meta; move it before sharding.",
    ),
    "labels on another device": (
        {"labels": torch.zeros(2, 6, device="meta", dtype=torch.int64)},
        InvalidInputError,
        "the batch must be on one device, but got input_ids on cpu, labels on meta; move it before sharding.",
    ),
    "a nested tensor": (
        {"inputs_embeds": torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(6, 4)], layout=torch.jagged)},
        UnsupportedError,
        "inputs_embeds is a nested or sparse tensor, but the batch contract cuts plain ones; give one document per "
        "row, padded to one length, with an attention_mask.",
    ),
    "a sparse tensor": (
        {"features": torch.eye(3).to_sparse()},
        UnsupportedError,
        "features is a nested or sparse tensor",
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
        {"input_ids": IDS[:0]},
    ],
    ids=["nothing", "labels only", "None", "1-D", "no token", "no row"],
)
def test_a_batch_without_tokens_is_refused(batch: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"^the batch needs input_ids \[B, S\] or inputs_embeds \[B, S, H\]"):
        shard_batch_for_cp(batch, None)


def test_what_is_no_mapping_is_refused_with_its_type() -> None:
    with pytest.raises(InvalidInputError, match="must be a mapping of names to tensors, but got Tensor"):
        shard_batch_for_cp(IDS, None)  # type: ignore[arg-type]


def test_a_mapping_that_is_no_dict_is_taken() -> None:
    assert torch.equal(shard_batch_for_cp(UserDict(input_ids=IDS), None)["input_ids"], IDS)


def test_ids_must_be_two_dimensional() -> None:
    with pytest.raises(InvalidInputError, match=r"input_ids must be 2-D and start with \[2, 6\], but got \[2, 6, 1\]"):
        shard_batch_for_cp({"input_ids": IDS[..., None]}, None)


def test_embeddings_may_stand_for_ids() -> None:
    embeds = torch.randn(2, 6, 4)
    found = shard_batch_for_cp({"inputs_embeds": embeds}, None)
    assert torch.equal(found["inputs_embeds"], embeds)
    assert "input_ids" not in found


def test_embeddings_may_stand_beside_ids() -> None:
    embeds = torch.randn(2, 6, 6)  # as wide as the sequence is long: still [B, S, H]
    found = shard(inputs_embeds=embeds)
    assert torch.equal(found["inputs_embeds"], embeds)
    assert torch.equal(found["input_ids"], IDS)


def test_a_batch_as_long_as_it_has_rows_is_cut_along_the_sequence() -> None:
    ids = torch.arange(4).view(2, 2)
    found = shard_batch_for_cp({"input_ids": ids, "labels": ids, "inputs_embeds": torch.ones(2, 2, 2)}, None)
    assert found["shift_labels"].tolist() == [[1, -100], [3, -100]]


def test_a_tensor_that_could_be_cut_is_refused_even_if_it_has_a_number_per_row() -> None:
    ids = torch.arange(4).view(2, 2)
    with pytest.raises(InvalidInputError, match=r"^image_sizes \[2, 3\] has a dim as long as the sequence, 2,"):
        shard_batch_for_cp({"input_ids": ids, "image_sizes": torch.zeros(2, 3)}, None)


def test_what_has_no_sequence_dim_passes_as_it_is() -> None:
    image, name, parts = torch.zeros(2, 3), object(), ["a", [torch.zeros(3)], {"b": 6}]
    found = shard(
        image_sizes=image,
        name=name,
        parts=parts,
        scale=torch.tensor(6.0),
        other_device=torch.zeros(2, device="meta"),
        nothing=None,
        use_cache=False,
        past_key_values=None,
        cu_seqlens=None,
    )
    assert found["image_sizes"] is image
    assert found["name"] is name
    assert found["parts"] is parts
    assert found["scale"].item() == 6.0
    assert found["use_cache"] is False
    assert {"nothing", "past_key_values", "cu_seqlens"}.isdisjoint(found)
