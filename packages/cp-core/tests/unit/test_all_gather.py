"""The strategy on one rank, and what it refuses."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cp_collectives import CollectiveTrace
from cp_core import (
    AllGatherStrategy,
    AttentionMeta,
    AttentionShape,
    HandoffMeta,
    InvalidInputError,
    LifecycleError,
    SequenceLayout,
    UnsupportedError,
)

LAYOUT = SequenceLayout(global_index=torch.arange(6), global_length=6, padded_length=6)
META = AttentionMeta(layout=LAYOUT)
LAYER = "model.layers.0.self_attn"


def inputs(num_heads: int = 4, num_kv_heads: int = 2, length: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(2, n, length, 8, dtype=torch.float64, generator=generator) for n in heads]


def attend(*tensors: torch.Tensor, **fields: Any) -> torch.Tensor:
    meta = AttentionMeta(**{"layout": LAYOUT, **fields})
    return AllGatherStrategy().attention(*tensors, cp_mesh=None, attention_meta=meta, layer=LAYER)


def test_one_rank_computes_plain_attention_and_sends_nothing() -> None:
    q, k, v = inputs()
    with CollectiveTrace() as trace:
        found = attend(q, k, v)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert trace.records == []


REFUSED_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 30.0}, "softcap (capped scores)"),
    "dropout_p": ({"dropout_p": 0.1}, "dropout_p (attention dropout)"),
    "mask": ({"mask": torch.ones(6, 6, dtype=torch.bool)}, "mask (an explicit attention mask)"),
    "two of them": (
        {"softcap": 30.0, "dropout_p": 0.5},
        "softcap (capped scores), dropout_p (attention dropout)",
    ),
}


@pytest.mark.parametrize(("fields", "named"), REFUSED_FIELDS.values(), ids=REFUSED_FIELDS.keys())
def test_a_field_that_is_not_honoured_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    sentence = (
        f"{LAYER}: AllGatherStrategy does not support {named} in this version; turn it off in the model's config, or "
        "train this model at cp_size 1."
    )
    with pytest.raises(UnsupportedError, match="^" + re.escape(sentence) + "$"):
        attend(*inputs(), **fields)


def test_every_field_of_the_meta_is_honoured_or_refused() -> None:
    honoured = {"layout", "causal", "scale", "window", "sinks"}
    assert {field.name for field in dataclasses.fields(AttentionMeta)} == honoured | (
        REFUSED_FIELDS.keys() - {"two of them"}
    )


def test_packed_documents_are_refused() -> None:
    layout = dataclasses.replace(LAYOUT, document_bounds=torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match=rf"^{LAYER}: packed documents are not supported in this version\.$"):
        attend(*inputs(), layout=layout)


def test_a_window_of_non_causal_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=rf"^{LAYER}: a window of non-causal attention is not supported in this"):
        attend(*inputs(), window=3, causal=False)


def test_pads_of_another_batch_are_refused_with_both_numbers_of_rows() -> None:
    layout = dataclasses.replace(LAYOUT, key_padding=torch.ones(3, 6, dtype=torch.bool))
    with pytest.raises(
        InvalidInputError, match=rf"^{LAYER}: the layout holds the pads of 3 rows, but q, k and v have 2"
    ):
        attend(*inputs(), layout=layout)


def test_sinks_of_other_heads_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=rf"^{LAYER}: sinks must be one logit per query head, \[4\], but got \[2\]"
    ):
        attend(*inputs(), sinks=torch.zeros(2))


def test_tensors_that_are_no_shard_of_the_layout_are_refused_with_shapes() -> None:
    sentence = rf"^{LAYER}: q, k and v must be \[B, N, L, D\] with L = 6 as the layout says, but got \(2, 4, 5, 8\), "
    with pytest.raises(InvalidInputError, match=sentence):
        attend(*inputs(length=5))
    with pytest.raises(InvalidInputError, match=r"must be \[B, N, L, D\] with L = 6"):
        attend(*(tensor[0] for tensor in inputs()))


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 4, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)],
        [(2, 4, 6, 8), (2, 2, 6, 8), (2, 4, 6, 8)],
        [(1, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)],
        [(2, 4, 6, 4), (2, 2, 6, 8), (2, 2, 6, 8)],
    ],
    ids=["heads", "k and v", "batch", "head dim"],
)
def test_queries_and_keys_that_do_not_fit_are_refused_with_shapes(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(f"but got q {shapes[0]}, k {shapes[1]}, v {shapes[2]}.")):
        attend(*(torch.zeros(shape) for shape in shapes))


def shape(**changes: Any) -> AttentionShape:
    fields = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 8, "dtype": torch.float32, "fqn": LAYER}
    return AttentionShape(**{**fields, "device": torch.device("cpu"), **changes})  # type: ignore[arg-type]


def test_any_number_of_heads_is_valid() -> None:
    AllGatherStrategy().validate(None, shape())


def test_a_device_without_a_kernel_is_refused_before_the_first_forward() -> None:
    with pytest.raises(UnsupportedError, match="no attention kernel for device type 'meta'"):
        AllGatherStrategy().validate(None, shape(device=torch.device("meta")))


def test_how_keys_are_kept_for_backward_is_checked() -> None:
    with pytest.raises(InvalidInputError, match="backward_kv must be 'saved' or 'regathered', but got 'shared'"):
        AllGatherStrategy(backward_kv="shared")  # type: ignore[arg-type]


def test_one_rank_has_nothing_to_gather_again() -> None:
    _, k, v = inputs()
    assert AllGatherStrategy(backward_kv="regathered").recall(k, v, cp_mesh=None, layer=LAYER) is None


def test_equal_strategies_are_equal_and_frozen() -> None:
    assert AllGatherStrategy() == AllGatherStrategy(backward_kv="saved")
    assert len({AllGatherStrategy(), AllGatherStrategy()}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        AllGatherStrategy().backward_kv = "regathered"  # type: ignore[misc]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_sequence_is_padded_to_the_number_of_ranks(cp_size: int) -> None:
    assert AllGatherStrategy().padding_multiple(cp_size) == cp_size


HANDOFF = HandoffMeta(layer=LAYER, attention_meta=META)


def test_launching_nothing_is_an_error() -> None:
    with pytest.raises(LifecycleError, match=rf"^layer '{LAYER}': AllGatherStrategy launches k and v, but neither was"):
        AllGatherStrategy().launch(inputs()[0], cp_mesh=None, handoff_meta=HANDOFF)


def test_launching_a_tensor_twice_is_an_error() -> None:
    _, k, _ = inputs()
    strategy = AllGatherStrategy()
    state = strategy.launch(k=k, cp_mesh=None, handoff_meta=HANDOFF)
    with pytest.raises(LifecycleError, match=rf"^layer '{LAYER}': k was launched twice for one attention\.$"):
        strategy.launch(k=k, cp_mesh=None, handoff_meta=dataclasses.replace(HANDOFF, state=state))


def test_waiting_twice_is_an_error() -> None:
    q, k, v = inputs()
    strategy = AllGatherStrategy()
    state = strategy.launch(q, k, v, cp_mesh=None, handoff_meta=HANDOFF)
    strategy.wait(state, q, k, v, attention_meta=META)
    with pytest.raises(LifecycleError, match=rf"^layer '{LAYER}': nothing is in flight; this launch was waited for"):
        strategy.wait(state, q, k, v, attention_meta=META)


def test_waiting_for_what_was_not_launched_is_an_error() -> None:
    q, k, v = inputs()
    strategy = AllGatherStrategy()
    state = strategy.launch(k=k, cp_mesh=None, handoff_meta=HANDOFF)
    with pytest.raises(LifecycleError, match=rf"^layer '{LAYER}': v was never launched\.$"):
        strategy.wait(state, q, k, v, attention_meta=META)


def test_the_output_is_home_and_is_taken_once() -> None:
    strategy, output = AllGatherStrategy(), inputs()[0]
    state = strategy.launch_output(output, cp_mesh=None, attention_meta=META)
    assert strategy.wait_output(state, attention_meta=META) is output
    with pytest.raises(LifecycleError, match="was waited for before"):
        strategy.wait_output(state, attention_meta=META)
    assert strategy.restore_output(output, cp_mesh=None, attention_meta=META) is output


def test_shard_batch_uses_the_strategys_padding() -> None:
    found = AllGatherStrategy().shard_batch({"input_ids": torch.arange(7)[None]}, None)
    assert found["cp_layout"].padded_length == 7
