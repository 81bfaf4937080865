"""What a strategy is told."""

import dataclasses

import pytest
import torch

from cp_core import AttentionMeta, AttentionShape, HandoffMeta, InvalidInputError, SequenceLayout


def shape(num_q_heads: int, num_kv_heads: int) -> AttentionShape:
    return AttentionShape(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        fqn="model.layers.0.self_attn",
    )


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_query_heads_are_a_multiple_of_key_heads(num_q_heads: int, num_kv_heads: int) -> None:
    assert shape(num_q_heads, num_kv_heads).num_kv_heads == num_kv_heads


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 3), (2, 4), (4, 0)])
def test_heads_that_do_not_fit_are_refused_with_module_and_numbers(num_q_heads: int, num_kv_heads: int) -> None:
    sentence = (
        rf"^model\.layers\.0\.self_attn: num_q_heads \({num_q_heads}\) must be a positive multiple of num_kv_heads "
        rf"\({num_kv_heads}\)\.$"
    )
    with pytest.raises(InvalidInputError, match=sentence):
        shape(num_q_heads, num_kv_heads)


def test_no_field_asks_for_anything_unless_told() -> None:
    meta = AttentionMeta(layout=SequenceLayout(global_index=torch.arange(2), global_length=2, padded_length=2))
    assert meta.causal
    neutral = {"scale": None, "window": None, "softcap": None, "sinks": None, "dropout_p": 0.0, "mask": None}
    assert {name: getattr(meta, name) for name in neutral} == neutral
    assert {field.name for field in dataclasses.fields(meta)} == {"layout", "causal", *neutral}


@pytest.mark.parametrize("kind", [AttentionShape, AttentionMeta, HandoffMeta, SequenceLayout], ids=lambda k: k.__name__)
def test_intent_is_keyword_only_and_frozen(kind: type) -> None:
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
