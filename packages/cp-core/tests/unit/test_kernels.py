"""The block kernels, against attention written out in float64.

The CUDA kernels run here over operators written out below, which read their arguments as the real ones do; on a machine
with a GPU the same tests run the real ones too. Shape rules and schemas: `test_kernels_cuda.py`.
"""

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_core import UnsupportedError
from cp_core.kernels import AttendedBlock, BlockKernel, Visible, block_kernel
from cp_core.kernels._cpu_flash import CpuFlash
from cp_core.kernels._cuda_efficient import CudaEfficient
from cp_core.kernels._cuda_flash import CudaFlash
from cp_core.kernels._math import MathBlock

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
NO_KEY = float("-inf")


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seen_keys(num_queries: int, num_keys: int, visible: Visible) -> torch.Tensor:
    """Return `[Lq, Lk]`, True where the row sees the column; the definition, word by word."""
    shift = num_queries - num_keys
    rules = {"all": lambda r, c: True, "causal": lambda r, c: c <= r, "after_diagonal": lambda r, c: c + shift > r}
    return torch.tensor([[rules[visible](r, c) for c in range(num_keys)] for r in range(num_queries)])


def scores_of(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float | None) -> torch.Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (q.shape[3] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~seen, NO_KEY)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp; differentiable, rows without keys included."""
    scores = scores_of(q, k, seen, scale)
    rows = seen.any(-1).nonzero().flatten()
    weights = torch.zeros_like(scores).index_copy(2, rows, scores[:, :, rows].softmax(-1))
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), scores.detach().logsumexp(-1)


def gradients(
    grad: torch.Tensor, block: AttendedBlock, seen: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dQ, dK, dV from the saved output and log-sum-exp; as many key heads as query heads."""
    q, k, v, output, logsumexp = block
    probabilities = (scores_of(q, k, seen, scale) - logsumexp.unsqueeze(-1)).exp()
    grad_scores = probabilities * (grad @ v.mT - (grad * output).sum(-1, keepdim=True))
    grad_scores *= q.shape[3] ** -0.5 if scale is None else scale
    return grad_scores @ k, grad_scores.mT @ q, probabilities.mT @ grad


def raw(tensor: torch.Tensor, *strides: int) -> torch.Tensor:
    """Read memory with the strides that a kernel takes for granted."""
    return tensor.as_strided(tensor.shape, strides)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert (dropout_p, return_debug_mask) == (0.0, False)
    assert {tensor.stride(-1) for tensor in (query, key, value)} == {1}
    seen = seen_keys(query.shape[2], key.shape[2], "causal" if is_causal else "all")
    output, logsumexp = attention(query, key, value, seen, scale)
    return output, logsumexp, None, None, query.shape[2], key.shape[2], None, None, None


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    num_heads, num_kv_heads, length = query.shape[1], key.shape[1], query.shape[2]
    assert (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p) == (None, None, length, key.shape[2], 0.0)
    assert {tensor.stride(-1) for tensor in (query, key, value)} == {1}
    assert (philox_seed.dtype, philox_offset.dtype) == (torch.uint64, torch.uint64)
    logsumexp = raw(logsumexp, num_heads * length, length, 1)
    k, v = (tensor.repeat_interleave(num_heads // num_kv_heads, 1) for tensor in (key, value))
    seen = seen_keys(length, key.shape[2], "causal" if is_causal else "all")
    dq, dk, dv = gradients(grad_out, AttendedBlock(query, k, v, out, logsumexp), seen, scale)
    return dq, dk.unflatten(1, (num_kv_heads, -1)).sum(2), dv.unflatten(1, (num_kv_heads, -1)).sum(2)


def efficient_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert (attn_bias, compute_log_sumexp, dropout_p) == (None, True, 0.0)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert {tensor.stride(-1) for tensor in (query, key, value)} == {1}
    seen = seen_keys(query.shape[2], key.shape[2], "causal" if is_causal else "all")
    output, logsumexp = attention(query, key, value, seen, scale)
    padded = logsumexp.new_full((*logsumexp.shape[:2], math.ceil(query.shape[2] / 32) * 32), float("inf"))
    padded[:, :, : query.shape[2]] = logsumexp
    return output.transpose(1, 2).contiguous().transpose(1, 2), padded, None, None


def efficient_backward(
    grad_out_: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    num_heads, length, head_dim = query.shape[1:]
    assert (attn_bias, dropout_p, grad_input_mask) == (None, 0.0, [True, True, True, False])
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert {tensor.stride(-1) for tensor in (query, key, value)} == {1}
    assert logsumexp.stride(1) % 8 == logsumexp.stride(0) % 8 == 0
    assert logsumexp[:, :, length:].eq(float("inf")).all()
    assert logsumexp.shape[2] == math.ceil(length / 32) * 32
    logsumexp = raw(logsumexp, logsumexp.stride(0), logsumexp.stride(1), 1)[:, :, :length]
    out = raw(out, out.stride(0), out.stride(1), num_heads * head_dim, 1)
    seen = seen_keys(length, key.shape[2], "causal" if is_causal else "all")
    return *gradients(grad_out_, AttendedBlock(query, key, value, out, logsumexp), seen, scale), None


WRITTEN_OUT: dict[Callable[..., Any], Any] = {
    flash_forward: torch.ops.aten._scaled_dot_product_flash_attention.default,
    flash_backward: torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    efficient_forward: torch.ops.aten._scaled_dot_product_efficient_attention.default,
    efficient_backward: torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
}


@pytest.mark.parametrize("written_out", WRITTEN_OUT, ids=lambda function: function.__name__)
def test_the_written_out_operators_take_what_torchs_take(written_out: Callable[..., Any]) -> None:
    ours = inspect.signature(written_out).parameters.values()
    theirs = WRITTEN_OUT[written_out]._schema.arguments
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in ours] == [(a.name, a.kwarg_only) for a in theirs]
    assert [p.default is not p.empty for p in ours] == [argument.has_default_value() for argument in theirs]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A kernel, where it runs and how near it comes to float64."""

    kernel: BlockKernel
    device: torch.device = CPU
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device, self.dtype)

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        wanted = expected.detach().to(found.device)
        torch.testing.assert_close(found.to(torch.float64), wanted, rtol=self.tolerance, atol=self.tolerance)


RUNS = {
    "CpuFlash": Run(kernel=CpuFlash()),
    "MathBlock": Run(kernel=MathBlock()),
    "CudaFlash": Run(kernel=CudaFlash(forward_operator=flash_forward, backward_operator=flash_backward)),
    "CudaEfficient": Run(
        kernel=CudaEfficient(forward_operator=efficient_forward, backward_operator=efficient_backward)
    ),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
if torch.cuda.is_available():
    RUNS |= {
        f"cuda {dtype}": Run(kernel=block_kernel(CUDA, dtype), device=CUDA, dtype=dtype, tolerance=tolerance)
        for dtype, tolerance in TOLERANCES.items()
    }

BLOCKS: list[tuple[Visible, int, int]] = [
    ("all", 7, 5),
    ("all", 5, 40),
    ("all", 1, 1),
    ("causal", 7, 7),
    ("causal", 33, 33),
    ("causal", 1, 1),
    ("after_diagonal", 7, 7),
    ("after_diagonal", 7, 6),
    ("after_diagonal", 9, 3),
    ("after_diagonal", 7, 1),
    ("after_diagonal", 1, 1),
    ("after_diagonal", 40, 34),
]
each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
each_block = pytest.mark.parametrize(
    ("visible", "num_queries", "num_keys"), BLOCKS, ids=[f"{v}-{lq}x{lk}" for v, lq, lk in BLOCKS]
)
each_head = pytest.mark.parametrize(("scale", "num_kv_heads"), list(itertools.product([None, 0.3], [4, 2, 1])))


def inputs(num_queries: int, num_keys: int, num_kv_heads: int = 2) -> list[torch.Tensor]:
    shapes = [(2, 4, num_queries, 8), (2, num_kv_heads, num_keys, 8), (2, num_kv_heads, num_keys, 8)]
    return [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


@each_run
@each_block
@each_head
def test_output_and_logsumexp_are_those_of_attention(
    run: Run, visible: Visible, num_queries: int, num_keys: int, scale: float | None, num_kv_heads: int
) -> None:
    given = inputs(num_queries, num_keys, num_kv_heads)
    output, logsumexp = attention(*given, seen_keys(num_queries, num_keys, visible), scale)
    block = run.kernel.forward(*map(run.ready, given), visible=visible, scale=scale)
    run.check(block.output, output)
    run.check(block.logsumexp, logsumexp)
    assert (block.output.dtype, block.output.shape) == (run.dtype, given[0].shape)


@each_run
@each_block
@each_head
def test_backward_is_that_of_attention(
    run: Run, visible: Visible, num_queries: int, num_keys: int, scale: float | None, num_kv_heads: int
) -> None:
    given = inputs(num_queries, num_keys, num_kv_heads)
    grad = normal(2, 4, num_queries, 8, seed=4)
    attention(*given, seen_keys(num_queries, num_keys, visible), scale)[0].backward(grad)
    block = run.kernel.forward(*map(run.ready, given), visible=visible, scale=scale)
    grads = run.kernel.backward(run.ready(grad), block, visible=visible, scale=scale)
    for found, tensor in zip(grads, given, strict=True):
        run.check(found, tensor.grad)
        assert (found.dtype, found.shape) == (run.dtype, tensor.shape)


@each_run
def test_rows_without_keys_are_zero_minus_infinity_and_without_gradient(run: Run) -> None:
    given = [run.ready(tensor) for tensor in inputs(6, 4)]
    block = run.kernel.forward(*given, visible="after_diagonal", scale=None)
    assert block.output[:, :, -1].eq(0).all()
    assert block.logsumexp[:, :, -1].eq(NO_KEY).all()
    assert block.logsumexp[:, :, :-1].isfinite().all()
    dq, dk, dv = run.kernel.backward(torch.ones_like(block.output), block, visible="after_diagonal", scale=None)
    assert dq[:, :, -1].eq(0).all()
    assert all(tensor.isfinite().all() for tensor in (dq, dk, dv))


class LargestOutput(TorchDispatchMode):
    """Remembers how many elements the largest output of any operation has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.num_elements = max([self.num_elements, *(tensor.numel() for tensor in tensors)])
        return result


@pytest.mark.parametrize("kernel", [CpuFlash(), CudaFlash(), CudaEfficient()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("num_keys", [64, 40])
def test_a_fused_kernel_needs_no_mask_after_the_diagonal(kernel: BlockKernel, num_keys: int) -> None:
    q, k, v = (torch.empty(1, 1, length, 8, device="meta") for length in (64, num_keys, num_keys))
    with LargestOutput() as largest:
        block = kernel.forward(q, k, v, visible="after_diagonal", scale=None)
        kernel.backward(block.output, block, visible="after_diagonal", scale=None)
    assert largest.num_elements == 64 * 8


LENGTH = 6


def window_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Queries LENGTH..2 LENGTH - 1 over LENGTH keys each, themselves included."""
    seen = torch.tensor([[r < c <= r + LENGTH for c in range(2 * LENGTH)] for r in range(LENGTH)])
    return attention(q, k, v, seen, None)[0]


@each_run
def test_blocks_of_a_window_are_merged_and_share_its_gradients(run: Run) -> None:
    q, k, v = inputs(LENGTH, 2 * LENGTH)
    grad = normal(2, 4, LENGTH, 8, seed=4)
    expected = window_attention(q, k, v)
    expected.backward(grad)
    spans: dict[Visible, slice] = {"after_diagonal": slice(0, LENGTH), "causal": slice(LENGTH, 2 * LENGTH)}
    queries, keys, values = map(run.ready, (q, k, v))
    blocks = {
        visible: run.kernel.forward(queries, keys[:, :, span], values[:, :, span], visible=visible, scale=None)
        for visible, span in spans.items()
    }
    logsumexp = torch.logaddexp(*(block.logsumexp for block in blocks.values()))
    output = sum(block.output * (block.logsumexp - logsumexp).exp().unsqueeze(-1) for block in blocks.values())
    run.check(output, expected)
    dq = torch.zeros_like(queries)
    for visible, span in spans.items():
        merged = blocks[visible]._replace(output=output.to(run.dtype), logsumexp=logsumexp)
        share, dk, dv = run.kernel.backward(run.ready(grad), merged, visible=visible, scale=None)
        dq += share
        run.check(dk, k.grad[:, :, span])
        run.check(dv, v.grad[:, :, span])
    run.check(dq, q.grad)


def as_rows_of_a_longer(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as rows 3.. of a tensor with more of them, as those of a second chunk are."""
    longer = tensor.new_full((*tensor.shape[:2], tensor.shape[2] + 5, *tensor.shape[3:]), math.nan)
    rows = longer[:, :, 3 : 3 + tensor.shape[2]]
    rows.copy_(tensor)
    return rows


def as_heads_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def as_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


LAYOUTS = [as_rows_of_a_longer, as_heads_last, as_columns]


@each_run
@pytest.mark.parametrize(
    ("visible", "num_queries", "num_keys"), [BLOCKS[0], ("all", 32, 5), BLOCKS[3], BLOCKS[7]], ids=str
)
@pytest.mark.parametrize("strided", LAYOUTS, ids=lambda function: function.__name__)
def test_strides_change_nothing(
    run: Run, visible: Visible, num_queries: int, num_keys: int, strided: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    given = [run.ready(tensor) for tensor in inputs(num_queries, num_keys)]
    grad = run.ready(normal(2, 4, num_queries, 8, seed=4))
    block = run.kernel.forward(*given, visible=visible, scale=None)
    again = run.kernel.forward(*map(strided, given), visible=visible, scale=None)
    run.check(again.output, block.output.double())
    run.check(again.logsumexp, block.logsumexp.double())
    saved = AttendedBlock(*map(strided, block))
    expected = run.kernel.backward(grad, block, visible=visible, scale=None)
    grads = run.kernel.backward(strided(grad), saved, visible=visible, scale=None)
    for found, wanted in zip(grads, expected, strict=True):
        run.check(found, wanted.double())


@pytest.mark.parametrize("kernel", [CpuFlash(), MathBlock()], ids=["CpuFlash", "MathBlock"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("visible", ["causal", "after_diagonal"])
def test_the_logsumexp_of_16_bit_inputs_is_fp32(kernel: BlockKernel, dtype: torch.dtype, visible: Visible) -> None:
    q, k, v = (normal(1, 2, 5, 8, seed=seed).to(dtype) for seed in range(3))
    block = kernel.forward(q, k, v, visible=visible, scale=None)
    assert isinstance(block, AttendedBlock)
    assert (block.output.dtype, block.logsumexp.dtype) == (dtype, torch.float32)
    assert {grad.dtype for grad in kernel.backward(q, block, visible=visible, scale=None)} == {dtype}


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "visible", "entries"),
    [
        (5, 7, "all", 35),
        (1000, 4000, "all", 4_000_000),
        (100, 100, "causal", 100 * 100),
        (512, 512, "causal", 512 * 512),
        (600, 600, "causal", 512 * 512 + 88 * 600),
        (768, 768, "causal", 256 * (512 + 512 + 768)),
        (1024, 1024, "causal", 256 * (512 + 512 + 1024 + 1024)),
        (2048, 2048, "causal", 2 * 256 * (512 + 1024 + 1536 + 2048)),
        (1, 1, "after_diagonal", 0),
        (101, 101, "after_diagonal", 100 * 100),
        (1025, 1025, "after_diagonal", 256 * (512 + 512 + 1024 + 1024)),
        (1035, 1025, "after_diagonal", 10 * 1025 + 256 * (512 + 512 + 1024 + 1024)),
    ],
)
def test_scored_entries_follow_the_kernels_blocks(
    num_queries: int, num_keys: int, visible: Visible, entries: int
) -> None:
    assert CpuFlash().scored_entries(num_queries, num_keys, visible=visible) == entries


def test_scored_entries_on_cuda_are_those_of_the_largest_tiles() -> None:
    assert CudaFlash().scored_entries(300, 300, visible="causal") == 128 * 128 + 128 * 256 + 44 * 300
    assert CudaEfficient().scored_entries(300, 300, visible="causal") == 128 * 128 + 128 * 256 + 44 * 300
    assert CudaEfficient().scored_entries(64, 64, visible="causal") == 64 * 64


@each_block
def test_the_parity_kernel_scores_everything(visible: Visible, num_queries: int, num_keys: int) -> None:
    assert MathBlock().scored_entries(num_queries, num_keys, visible=visible) == num_queries * num_keys


MISSHAPEN = [("all", 3, 0), ("causal", 3, 4), ("causal", 4, 3), ("after_diagonal", 3, 4), ("after_diagonal", 3, 0)]


@each_run
@pytest.mark.parametrize(("visible", "num_queries", "num_keys"), [*MISSHAPEN, ("windowed", 3, 3)])
def test_a_block_that_no_kernel_has_is_not_computed(run: Run, visible: Any, num_queries: int, num_keys: int) -> None:
    q, k, v = (run.ready(tensor) for tensor in inputs(num_queries, num_keys))
    block = AttendedBlock(q, k, v, q, q[..., 0])
    says = rf"^no block kernel has visible='{visible}' with {num_queries} queries and {num_keys} keys\.$"
    with pytest.raises(AssertionError, match=says):
        run.kernel.forward(q, k, v, visible=visible, scale=None)
    with pytest.raises(AssertionError, match=says):
        run.kernel.backward(q, block, visible=visible, scale=None)
    with pytest.raises(AssertionError, match=says):
        run.kernel.scored_entries(num_queries, num_keys, visible=visible)


@pytest.mark.parametrize(
    ("device", "dtype", "kind"),
    [
        ("cpu", torch.float64, CpuFlash),
        ("cpu", torch.float32, CpuFlash),
        ("cpu", torch.bfloat16, CpuFlash),
        ("cpu", torch.float16, CpuFlash),
        ("cuda", torch.float64, MathBlock),
        ("cuda:1", torch.float32, CudaEfficient),
        ("cuda", torch.bfloat16, CudaFlash),
        ("cuda", torch.float16, CudaFlash),
    ],
)
def test_device_and_dtype_choose_the_kernel(device: str, dtype: torch.dtype, kind: type) -> None:
    assert type(block_kernel(torch.device(device), dtype)) is kind


def test_a_device_without_a_kernel_is_refused_with_the_choices() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^no attention kernel for device type 'meta' in this .*; available: cpu, cuda\.$"
    ):
        block_kernel(torch.device("meta"), torch.float32)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dtype_without_a_kernel_is_refused_with_the_choices(device: str) -> None:
    with pytest.raises(
        UnsupportedError,
        match=rf"^no attention kernel for torch.float8_e4m3fn on device type '{device}' in this .*; available: "
        r"torch.bfloat16, torch.float16, torch.float32, torch.float64\.$",
    ):
        block_kernel(torch.device(device), torch.float8_e4m3fn)
