"""Local queries against the whole sequence, against torch's attention over the whole sequence in float64.

B batch, N query heads, K key/value heads, L local queries, S sequence, D head dim.
"""

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cp_core import AttentionMeta, SequenceLayout, local_attention

LAYOUTS = {
    "whole": [*range(12)],
    "contiguous, first": [0, 1, 2, 3],
    "contiguous, middle": [4, 5, 6, 7],
    "contiguous, last": [8, 9, 10, 11],
    "zigzag, outer": [0, 1, 2, 9, 10, 11],
    "zigzag, inner": [3, 4, 5, 6, 7, 8],
    "one token": [7],
    "scattered": [1, 4, 5, 9],
    "later run first": [8, 9, 2, 3],
}
HEADS = {"4/4": (4, 4), "4/2": (4, 2), "4/1": (4, 1)}
LENGTH = 12


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(num_heads: int, num_kv_heads: int, *, batch: int = 2, length: int = LENGTH) -> list[torch.Tensor]:
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [normal(batch, n, length, 8, seed=seed).requires_grad_() for seed, n in enumerate(heads)]


def meta(positions: list[int], *, length: int = LENGTH, **fields: object) -> AttentionMeta:
    layout = SequenceLayout(global_index=torch.tensor(positions), global_length=length, padded_length=LENGTH)
    return AttentionMeta(layout=layout, **fields)  # type: ignore[arg-type]


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def assert_equal_to_oracle(positions: list[int], heads: tuple[int, int], scale: float | None, factor: float) -> None:
    q, k, v = (tensor.detach().mul(factor).requires_grad_() for tensor in inputs(*heads))
    index = torch.tensor(positions)
    grad = normal(2, heads[0], len(positions), 8, seed=9)
    expected = oracle(q, k, v, scale=scale)[:, :, index]
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    local_q = q.detach()[:, :, index].requires_grad_()
    found = local_attention(local_q, k, v, attention_meta=meta(positions, scale=scale))
    gradients = torch.autograd.grad(found, (local_q, k, v), grad)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients, (wanted[0][:, :, index], *wanted[1:]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12 * factor)


@pytest.mark.parity
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("positions", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_outputs_and_gradients_are_the_rows_of_the_whole(positions: list[int], heads: tuple[int, int]) -> None:
    assert_equal_to_oracle(positions, heads, None, 1.0)


@pytest.mark.parity
@pytest.mark.parametrize("positions", [LAYOUTS["contiguous, last"], LAYOUTS["zigzag, outer"]], ids=["last", "zigzag"])
@pytest.mark.parametrize("scale", [0.02, 1.7])
def test_a_given_scale_is_used(positions: list[int], scale: float) -> None:
    assert_equal_to_oracle(positions, (4, 2), scale, 1.0)


@pytest.mark.parity
def test_scores_that_overflow_plain_exponentials_are_merged_right() -> None:
    q, k, _ = inputs(4, 2)
    factor = 60.0
    assert (factor**2 * q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5).abs().max() > 5000  # exp(710) is inf
    assert_equal_to_oracle(LAYOUTS["zigzag, outer"], (4, 2), None, factor)


@pytest.mark.parametrize("side", ["prefix", "diagonal"])
def test_a_block_that_outweighs_the_other_by_far_is_the_result(side: str) -> None:
    q, k, v = (tensor.detach() for tensor in inputs(1, 1))
    q, k = torch.ones_like(q), torch.zeros_like(k)
    k[:, :, 2 if side == "prefix" else 6] = 1e3
    out = local_attention(q[:, :, 6:], k, v, attention_meta=meta([*range(6, 12)]))
    torch.testing.assert_close(out, v[:, :, [2 if side == "prefix" else 6]].expand_as(out), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changed", ["k", "v"])
def test_a_query_does_not_see_what_comes_after_it(changed: str) -> None:
    q, k, v = (tensor.detach() for tensor in inputs(4, 2))
    positions = LAYOUTS["contiguous, middle"]
    before = local_attention(q[:, :, 4:8], k, v, attention_meta=meta(positions))
    (k if changed == "k" else v)[:, :, 6] += 100
    after = local_attention(q[:, :, 4:8], k, v, attention_meta=meta(positions))
    same = [torch.equal(before[:, :, row], after[:, :, row]) for row in range(4)]
    assert same == [True, True, False, False]


@pytest.mark.parametrize("positions", [LAYOUTS["contiguous, last"], LAYOUTS["zigzag, outer"]], ids=["last", "zigzag"])
def test_an_expanded_gradient_and_strided_inputs_are_taken(positions: list[int]) -> None:
    """What `out.sum().backward()` and a transposed projection give."""
    index = torch.tensor(positions)
    q, k, v = (tensor.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in inputs(4, 2))
    wanted = torch.autograd.grad(oracle(q, k, v)[:, :, index].sum(), (q, k, v))
    found = local_attention(q[:, :, index], k, v, attention_meta=meta(positions))
    for one, other in zip(torch.autograd.grad(found.sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parity
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_is_nearly_as_close_as_attention_over_the_whole_sequence(dtype: torch.dtype) -> None:
    """Two blocks are rounded and summed where the whole has one, which costs at most a factor of two."""
    exact_inputs = [tensor.detach().to(dtype).double().requires_grad_() for tensor in inputs(4, 2, batch=4)]
    positions = LAYOUTS["contiguous, last"]
    grad = normal(4, 4, 4, 8, seed=9).to(dtype)
    exact_out = oracle(*exact_inputs)[:, :, 8:]
    exact = [exact_out, *torch.autograd.grad(exact_out, exact_inputs, grad.double())]
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in exact_inputs)
    whole_out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, 8:]
    whole = [whole_out, *torch.autograd.grad(whole_out, (q, k, v), grad)]
    found_out = local_attention(q[:, :, 8:], k, v, attention_meta=meta(positions))
    found = [found_out, *torch.autograd.grad(found_out, (q, k, v), grad)]
    assert found_out.dtype == dtype
    for ours, theirs, right in zip(found, whole, exact, strict=True):
        assert relative_error(ours, right) <= 2 * relative_error(theirs, right)


@pytest.mark.parametrize("frozen", list(itertools.product([True, False], repeat=3)), ids=str)
def test_frozen_inputs_get_no_gradient(frozen: tuple[bool, ...]) -> None:
    tensors = [tensor.detach().requires_grad_(not off) for tensor, off in zip(inputs(4, 2), frozen, strict=True)]
    out = local_attention(tensors[0][:, :, 4:8], *tensors[1:], attention_meta=meta([4, 5, 6, 7]))
    assert out.requires_grad == (not all(frozen))
    if out.requires_grad:
        out.sum().backward()
    assert [tensor.grad is None for tensor in tensors] == list(frozen)


def test_keys_past_the_last_query_get_zero_gradients() -> None:
    q, k, v = inputs(4, 2)
    local_attention(q[:, :, 4:8], k, v, attention_meta=meta([4, 5, 6, 7])).sum().backward()
    for tensor in (k, v):
        assert tensor.grad is not None
        assert tensor.grad[:, :, 8:].abs().max() == 0
        assert (tensor.grad[:, :, :8].abs().amax((0, 1, 3)) > 0).all()
