"""Pads, windows and sinks: each query sees exactly its keys, against masked attention written out in float64.

B batch, N query heads, K key/value heads, L local queries, S sequence, D head dim.
"""

import itertools
from typing import Any

import pytest
import torch

from cp_core import AttentionMeta, SequenceLayout, local_attention
from cp_core._local_attention import KeyValueRecall

LENGTH = 24
SHARDS = {
    "first": [*range(8)],
    "middle": [*range(8, 16)],
    "last": [*range(16, 24)],
    "zigzag": [*range(4), *range(20, 24)],
    "whole": [*range(24)],
}
# Pads at the left and at the right of each of the two rows.
PADS = {
    "no pads": None,
    "right": ((0, 5), (0, 9)),
    "left": ((3, 0), (10, 0)),
    "both": ((3, 5), (9, 1)),
    "equal": ((9, 2), (9, 2)),
    "a row of pads": ((24, 0), (2, 1)),
    "one token": ((11, 12), (0, 23)),
}
WINDOWS = [None, 1, 2, 5, 11, 24, 40]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_layout(positions: list[int], pads: tuple[tuple[int, int], ...] | None) -> SequenceLayout:
    padding = None
    if pads is not None:
        index = torch.arange(LENGTH)
        padding = torch.stack([(index >= left) & (index < LENGTH - right) for left, right in pads])
    return SequenceLayout(
        global_index=torch.tensor(positions), global_length=LENGTH, padded_length=LENGTH, key_padding=padding
    )


def visible(layout: SequenceLayout, *, causal: bool, window: int | None) -> torch.Tensor:
    """Return `[2, L, S]` bool: whether a query sees a key."""
    queries, keys = layout.global_index[:, None], torch.arange(LENGTH)
    seen = torch.ones(2, layout.local_length, LENGTH, dtype=torch.bool)
    if causal:
        seen &= keys <= queries
    if window is not None:
        seen &= keys > queries - window
    if layout.key_padding is not None:
        seen &= layout.key_padding[:, None, :] & layout.key_padding[:, layout.global_index, None]
    return seen


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seen: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    logits = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    blind = ~seen.any(-1)[:, None, :, None]
    weights = logits.masked_fill(blind, 0.0).softmax(-1)[..., :LENGTH].masked_fill(blind, 0.0)
    return weights @ v.repeat_interleave(groups, 1)


def assert_equal_to_oracle(
    layout: SequenceLayout,
    *,
    heads: tuple[int, int] = (4, 2),
    sinks: torch.Tensor | None = None,
    factor: float = 1.0,
    **fields: Any,
) -> None:
    q = (normal(2, heads[0], layout.local_length, 8, seed=1) * factor).requires_grad_()
    k, v = ((normal(2, heads[1], LENGTH, 8, seed=seed) * factor).requires_grad_() for seed in (2, 3))
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    grad = normal(2, heads[0], layout.local_length, 8, seed=4)
    seen = visible(layout, causal=fields.get("causal", True), window=fields.get("window"))
    expected = oracle(q, k, v, seen=seen, sinks=sinks)
    found = local_attention(q, k, v, attention_meta=AttentionMeta(layout=layout, sinks=sinks, **fields))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * factor)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for one, other in zip(torch.autograd.grad(found, inputs, grad), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12 * factor)


@pytest.mark.parity
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("pads", PADS.values(), ids=PADS.keys())
@pytest.mark.parametrize("positions", SHARDS.values(), ids=SHARDS.keys())
def test_causal_queries_see_real_keys_inside_their_window(
    positions: list[int], pads: tuple[tuple[int, int], ...] | None, window: int | None
) -> None:
    assert_equal_to_oracle(make_layout(positions, pads), window=window)


@pytest.mark.parity
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("pads", PADS.values(), ids=PADS.keys())
@pytest.mark.parametrize("positions", SHARDS.values(), ids=SHARDS.keys())
def test_non_causal_queries_see_all_real_keys(
    positions: list[int], pads: tuple[tuple[int, int], ...] | None, heads: tuple[int, int]
) -> None:
    assert_equal_to_oracle(make_layout(positions, pads), heads=heads, causal=False)


@pytest.mark.parity
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
@pytest.mark.parametrize("pads", [None, PADS["both"], PADS["a row of pads"]], ids=["no pads", "both", "a row of pads"])
@pytest.mark.parametrize("positions", [SHARDS["middle"], SHARDS["zigzag"]], ids=["middle", "zigzag"])
def test_a_sink_takes_its_share_of_each_softmax(
    positions: list[int], pads: tuple[tuple[int, int], ...] | None, causal: bool, window: int | None
) -> None:
    sinks = normal(4, seed=7).requires_grad_()
    assert_equal_to_oracle(make_layout(positions, pads), sinks=sinks, causal=causal, window=window)


@pytest.mark.parity
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
def test_scores_that_overflow_plain_exponentials_come_out_right(causal: bool, window: int | None) -> None:
    layout = make_layout(SHARDS["middle"], PADS["both"])
    assert_equal_to_oracle(layout, factor=60.0, causal=causal, window=window)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
@pytest.mark.parametrize("content", [1e30, float("inf"), float("nan")], ids=str)
def test_what_pads_hold_changes_nothing(content: float, causal: bool, window: int | None) -> None:
    layout = make_layout(SHARDS["middle"], PADS["both"])
    meta = AttentionMeta(layout=layout, causal=causal, window=window)
    q, k, v = (normal(2, 4, length, 8, seed=seed) for seed, length in enumerate((8, LENGTH, LENGTH)))
    assert layout.key_padding is not None
    pads = ~layout.key_padding[:, None, :, None]
    results = []
    for fill in (0.0, content):
        tensors = (q.masked_fill(pads[:, :, 8:16], fill), k.masked_fill(pads, fill), v.masked_fill(pads, fill))
        leaves = [tensor.requires_grad_() for tensor in tensors]
        output = local_attention(*leaves, attention_meta=meta)
        results.append((output, *torch.autograd.grad(output, leaves, torch.ones_like(output))))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("pads", "window"), [(PADS["both"], None), (None, 5), (PADS["left"], 5)], ids=["pads", "window", "pads and window"]
)
@pytest.mark.parametrize("positions", SHARDS.values(), ids=SHARDS.keys())
def test_each_visible_pair_is_in_exactly_one_block(
    positions: list[int], pads: tuple[tuple[int, int], ...] | None, window: int | None
) -> None:
    """The gradient of the values under uniform attention counts how often a key is seen."""
    layout = make_layout(positions, pads)
    q, k = torch.zeros(2, 1, layout.local_length, 8), torch.zeros(2, 1, LENGTH, 8)
    v = torch.eye(LENGTH).expand(2, 1, LENGTH, LENGTH)
    found = local_attention(
        *(torch.nn.functional.pad(tensor, (0, LENGTH - 8)) for tensor in (q, k)),
        v,
        attention_meta=AttentionMeta(layout=layout, window=window),
    )
    seen = visible(layout, causal=True, window=window)
    assert torch.equal(found[:, 0] > 0, seen)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(20))
def test_long_windows_are_cut_into_tiles(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length, window = (int(torch.randint(300, 900, (), generator=generator)) for _ in range(2))
    start = int(torch.randint(0, length - 100, (), generator=generator))
    left = int(torch.randint(0, start + 50, (), generator=generator))
    padding = (torch.arange(length) >= left)[None]
    positions = torch.arange(start, length)
    layout = SequenceLayout(global_index=positions, global_length=length, padded_length=length, key_padding=padding)
    q, k, v = (normal(1, 1, n, 4, seed=s) for s, n in enumerate((len(positions), length, length)))
    found = local_attention(q, k, v, attention_meta=AttentionMeta(layout=layout, window=window))
    keys = torch.arange(length)
    seen = (keys <= positions[:, None]) & (keys > positions[:, None] - window) & padding[:, None, :]
    seen = seen[0]
    real = positions >= left
    scores = (q[0, 0] @ k[0, 0].T * 0.5).masked_fill(~seen, float("-inf"))[real]
    torch.testing.assert_close(found[0, 0, real], scores.softmax(-1) @ v[0, 0], rtol=1e-11, atol=1e-12)
    assert not found[0, 0, ~real].any()


@pytest.mark.parity
@pytest.mark.parametrize("frozen", list(itertools.product([True, False], repeat=2)), ids=str)
def test_keys_recalled_in_backward_give_the_same_gradients(frozen: tuple[bool, bool]) -> None:
    layout = make_layout(SHARDS["middle"], PADS["both"])
    meta = AttentionMeta(layout=layout, window=5)
    q, k, v = (normal(2, 4, n, 8, seed=seed) for seed, n in enumerate((8, LENGTH, LENGTH)))
    results, calls = [], []

    def gather(local_k: torch.Tensor, local_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((len(results), torch.equal(local_k, k[:, :, 8:16]), torch.equal(local_v, v[:, :, 8:16])))
        return k, v

    for given in (None, KeyValueRecall(k[:, :, 8:16], v[:, :, 8:16], gather)):
        leaves = [q.clone().requires_grad_()]
        leaves += [t.clone().requires_grad_(not off) for t, off in zip((k, v), frozen, strict=True)]
        local_attention(*leaves, attention_meta=meta, recall=given).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    assert calls == [(1, True, True)]
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_gradients_of_keys_that_many_runs_see_are_not_added_up_in_16_bit() -> None:
    length = 512
    positions = torch.arange(0, length, 2)  # each query a run of its own
    layout = SequenceLayout(global_index=positions, global_length=length, padded_length=length)
    q, k, v = (normal(1, 1, n, 8, seed=seed) for seed, n in enumerate((len(positions), length, length)))
    grad = normal(1, 1, len(positions), 8, seed=9)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in (q, k, v)]
        output = local_attention(*leaves, attention_meta=AttentionMeta(layout=layout))
        gradients.append(torch.autograd.grad(output, leaves, grad.bfloat16().to(dtype)))
    for found, exact in zip(*gradients, strict=True):
        assert (found.double() - exact).norm() <= 0.006 * exact.norm()
