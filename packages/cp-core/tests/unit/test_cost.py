"""The cost model against numbers worked out by hand."""

import dataclasses

import pytest
import torch

from cp_core import (
    AllGatherStrategy,
    AttentionMeta,
    AttentionShape,
    SequenceLayout,
    UnsupportedError,
    local_attention,
)
from cp_core.cost import AttentionCost, attention_cost

SHAPE = AttentionShape(
    num_q_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16, device=torch.device("cpu"), fqn="attn"
)


def cost(positions: list[int], length: int, *, cp_size: int, causal: bool = True, batch_size: int = 3) -> AttentionCost:
    layout = SequenceLayout(global_index=torch.tensor(positions), global_length=length, padded_length=length)
    return attention_cost(
        AllGatherStrategy(), shape=SHAPE, layout=layout, batch_size=batch_size, cp_size=cp_size, causal=causal
    )


def test_the_second_of_two_shards() -> None:
    found = cost([4, 5, 6, 7], 8, cp_size=2)
    bytes_received = 2 * 3 * 2 * 8 * 4 * (2 - 1) * 2  # 2 * B * Nkv * D * L * (C - 1) * itemsize
    scored, visible = 3 * 4 * (4 * 4 + 4 * 4), 3 * 4 * (5 + 6 + 7 + 8)
    assert found == AttentionCost(
        forward_messages=1,
        backward_messages=1,
        forward_bytes=bytes_received,
        backward_bytes=bytes_received,
        scored_entries=scored,
        visible_entries=visible,
        forward_flops=4 * 8 * scored,
        backward_flops=10 * 8 * scored,
        # q and output of 4 tokens, k and v of 8, in 2 bytes; a log-sum-exp of 4 bytes per query
        saved_bytes=(2 * 3 * 4 * 4 * 8 + 2 * 3 * 2 * 8 * 8) * 2 + 3 * 4 * 4 * 4,
    )


def test_one_rank_sends_nothing() -> None:
    found = cost([*range(8)], 8, cp_size=1)
    assert (found.forward_messages, found.backward_messages, found.forward_bytes, found.backward_bytes) == (0, 0, 0, 0)
    assert found.visible_entries == 12 * 36


def test_contiguous_shards_see_all_pairs_once() -> None:
    shards = [cost([*range(start, start + 4)], 16, cp_size=4) for start in (0, 4, 8, 12)]
    assert sum(shard.visible_entries for shard in shards) == 12 * 16 * 17 // 2
    assert [shard.scored_entries for shard in shards] == [12 * n for n in (16, 32, 48, 64)]


def test_zigzag_shards_see_the_same_number_of_pairs() -> None:
    outer, inner = cost([0, 1, 6, 7], 8, cp_size=2), cost([2, 3, 4, 5], 8, cp_size=2)
    assert outer.visible_entries == inner.visible_entries == 12 * 18
    assert outer.scored_entries == 12 * (2 * 2 + 2 * 6 + 2 * 2)
    assert inner.scored_entries == 12 * (4 * 2 + 4 * 4)


def test_non_causal_attention_sees_every_real_key() -> None:
    layout = SequenceLayout(global_index=torch.arange(4, 8), global_length=7, padded_length=8)
    found = attention_cost(AllGatherStrategy(), shape=SHAPE, layout=layout, batch_size=3, cp_size=2, causal=False)
    assert found.scored_entries == found.visible_entries == 12 * 3 * 7


def test_pads_are_not_scored() -> None:
    real = torch.tensor([[False] * 5 + [True] * 3, [True] * 6 + [False] * 2, [False] * 8])
    layout = SequenceLayout(global_index=torch.arange(4, 8), global_length=8, padded_length=8, key_padding=real)
    found = attention_cost(AllGatherStrategy(), shape=SHAPE, layout=layout, batch_size=3, cp_size=2)
    assert found.scored_entries == 4 * (3 * 3 + (2 * 2 + 2 * 4))
    assert found.visible_entries == 4 * ((1 + 2 + 3) + (5 + 6))


def test_keys_before_the_window_are_not_scored() -> None:
    layout = SequenceLayout(global_index=torch.arange(512, 1024), global_length=1024, padded_length=1024)
    windowed = dataclasses.replace(SHAPE, window=256)
    found = attention_cost(AllGatherStrategy(), shape=windowed, layout=layout, batch_size=1, cp_size=2)
    assert found.visible_entries == 4 * 512 * 256
    edge = 255 + 254 * 254  # of its 256 rows, the first over 255 keys, the last over none
    assert found.scored_entries == 4 * 2 * (256 * 256 + edge)


def test_gathering_again_costs_a_message_and_saves_the_other_ranks_keys() -> None:
    layout = SequenceLayout(global_index=torch.arange(4), global_length=16, padded_length=16)
    saved, again = (
        attention_cost(AllGatherStrategy(backward_kv=kept), shape=SHAPE, layout=layout, batch_size=3, cp_size=4)
        for kept in ("saved", "regathered")
    )
    assert (again.backward_messages, again.backward_bytes) == (2, 2 * saved.forward_bytes)
    assert saved.saved_bytes - again.saved_bytes == 2 * 3 * 2 * 8 * (16 - 4) * 2  # k and v of 12 tokens in 2 bytes
    assert dataclasses.replace(again, backward_messages=1, backward_bytes=saved.backward_bytes) == dataclasses.replace(
        saved, saved_bytes=again.saved_bytes
    )


@pytest.mark.parametrize(
    ("local_length", "diagonal"),
    [(767, 512 * 512 + 255 * 767), (768, 256 * (512 + 512 + 768)), (1024, 256 * (512 + 512 + 1024 + 1024))],
)
def test_long_diagonals_are_scored_by_blocks_of_the_kernel(local_length: int, diagonal: int) -> None:
    positions = [*range(local_length, 2 * local_length)]
    found = cost(positions, 2 * local_length, cp_size=2, batch_size=1)
    assert found.scored_entries == 4 * (local_length**2 + diagonal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_saved_bytes_are_what_autograd_keeps(dtype: torch.dtype, causal: bool) -> None:
    layout = SequenceLayout(global_index=torch.arange(4, 8), global_length=11, padded_length=12)
    q = torch.randn(3, 4, 4, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(3, 2, 12, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = local_attention(q, k, v, attention_meta=AttentionMeta(layout=layout, causal=causal))
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    expected = attention_cost(
        AllGatherStrategy(), shape=shape, layout=layout, batch_size=3, cp_size=3, causal=causal
    ).saved_bytes
    assert output.requires_grad
    assert sum(kept.values()) == expected


def test_bytes_follow_the_dtype() -> None:
    layout = SequenceLayout(global_index=torch.arange(4), global_length=8, padded_length=8)
    costs = [
        attention_cost(
            AllGatherStrategy(), shape=dataclasses.replace(SHAPE, dtype=dtype), layout=layout, batch_size=1, cp_size=2
        )
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    assert [found.forward_bytes for found in costs] == [256, 512, 1024]


def test_an_unknown_strategy_is_refused_by_name() -> None:
    layout = SequenceLayout(global_index=torch.arange(4), global_length=8, padded_length=8)
    with pytest.raises(UnsupportedError, match=r"^the cost model does not know object\.$"):
        attention_cost(object(), shape=SHAPE, layout=layout, batch_size=1, cp_size=2)


def test_four_shards_of_8192_tokens_score_little_more_than_what_is_visible() -> None:
    costs = []
    for rank in range(4):
        layout = SequenceLayout.contiguous(global_length=8192, multiple_of=4, cp_size=4, cp_rank=rank)
        costs.append(attention_cost(AllGatherStrategy(), shape=SHAPE, layout=layout, batch_size=1, cp_size=4))
    scored, visible = (sum(getattr(cost, name) for cost in costs) for name in ("scored_entries", "visible_entries"))
    assert visible == 4 * 8192 * 8193 // 2
    assert 1 <= scored / visible <= 1.07
