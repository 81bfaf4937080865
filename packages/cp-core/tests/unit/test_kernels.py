"""The block kernels, against attention written out in float64."""

import itertools

import pytest
import torch

from cp_core import UnsupportedError
from cp_core.kernels import AttendedBlock, block_kernel

CPU = torch.device("cpu")


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scores_of(q: torch.Tensor, k: torch.Tensor, *, causal: bool, scale: float) -> torch.Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores


CASES = list(itertools.product([True, False], [None, 0.3], [4, 2, 1]))


@pytest.mark.parametrize(("causal", "scale", "num_kv_heads"), CASES)
def test_output_and_logsumexp_are_those_of_attention(causal: bool, scale: float | None, num_kv_heads: int) -> None:
    q = normal(2, 4, 7, 8, seed=1)
    k, v = (normal(2, num_kv_heads, 7, 8, seed=seed) for seed in (2, 3))
    block = block_kernel(CPU, torch.float64).forward(q, k, v, visible="causal" if causal else "all", scale=scale)
    scores = scores_of(q, k, causal=causal, scale=8**-0.5 if scale is None else scale)
    torch.testing.assert_close(block.logsumexp, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    expected = scores.softmax(-1) @ v.repeat_interleave(4 // num_kv_heads, 1)
    torch.testing.assert_close(block.output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("causal", "scale", "num_kv_heads"), CASES)
def test_backward_is_that_of_attention(causal: bool, scale: float | None, num_kv_heads: int) -> None:
    q = normal(2, 4, 7, 8, seed=1).requires_grad_()
    k, v = (normal(2, num_kv_heads, 7, 8, seed=seed).requires_grad_() for seed in (2, 3))
    grad = normal(2, 4, 7, 8, seed=4)
    scores = scores_of(q, k, causal=causal, scale=8**-0.5 if scale is None else scale)
    (scores.softmax(-1) @ v.repeat_interleave(4 // num_kv_heads, 1)).backward(grad)
    kernel = block_kernel(CPU, torch.float64)
    block = kernel.forward(q.detach(), k.detach(), v.detach(), visible="causal" if causal else "all", scale=scale)
    for found, tensor in zip(
        kernel.backward(grad, block, visible="causal" if causal else "all", scale=scale), (q, k, v), strict=True
    ):
        torch.testing.assert_close(found, tensor.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_logsumexp_of_16_bit_inputs_is_fp32(dtype: torch.dtype) -> None:
    q, k, v = (normal(1, 2, 5, 8, seed=seed).to(dtype) for seed in range(3))
    block = block_kernel(CPU, torch.float64).forward(q, k, v, visible="causal", scale=None)
    assert isinstance(block, AttendedBlock)
    assert (block.output.dtype, block.logsumexp.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal", "entries"),
    [
        (5, 7, False, 35),
        (1000, 4000, False, 4_000_000),
        (100, 100, True, 100 * 100),
        (512, 512, True, 512 * 512),
        (600, 600, True, 512 * 512 + 88 * 600),
        (768, 768, True, 256 * (512 + 512 + 768)),
        (1024, 1024, True, 256 * (512 + 512 + 1024 + 1024)),
        (2048, 2048, True, 2 * 256 * (512 + 1024 + 1536 + 2048)),
    ],
)
def test_scored_entries_follow_the_kernels_blocks(num_queries: int, num_keys: int, causal: bool, entries: int) -> None:
    assert (
        block_kernel(CPU, torch.float64).scored_entries(num_queries, num_keys, visible="causal" if causal else "all")
        == entries
    )


def test_a_device_without_a_kernel_is_refused_with_the_choices() -> None:
    with pytest.raises(
        UnsupportedError, match=r"no attention kernel for device type 'meta' in this .*; available: cpu\."
    ):
        block_kernel(torch.device("meta"), torch.float32)
