"""The CUDA kernels' calls of torch's operators, on device meta: schemas, shapes and dtypes, and no numbers.

What the wrappers compute around the operators: `test_kernels.py`.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cp_core import AllGatherStrategy, AttentionShape, UnsupportedError
from cp_core.kernels import Visible, block_kernel

CUDA = torch.device("cuda")
BLOCKS: list[tuple[Visible, int, int]] = [
    ("all", 7, 45),
    ("all", 1, 1),
    ("causal", 33, 33),
    ("after_diagonal", 33, 33),
    ("after_diagonal", 33, 10),
    ("after_diagonal", 33, 1),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SCHEMAS = {
    "_scaled_dot_product_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool "
        "return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor "
        "cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, Tensor "
        "philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
    "_scaled_dot_product_efficient_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool "
        "is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor "
        "philox_offset)"
    ),
    "_scaled_dot_product_efficient_attention_backward": (
        "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, "
        "Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, "
        "float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_operators_are_those_that_the_kernels_were_written_for(name: str) -> None:
    assert str(getattr(torch.ops.aten, name).default._schema) == f"aten::{name}{SCHEMAS[name]}"


class CalledOperators(TorchDispatchMode):
    """Remembers the names of the attention operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func._schema.name:
            self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def empty(*shape: int, dtype: torch.dtype, heads_last: bool) -> torch.Tensor:
    if not heads_last:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty([shape[i] for i in (0, 2, 1, 3)], dtype=dtype, device="meta").transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("visible", "num_queries", "num_keys"), BLOCKS, ids=str)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("heads_last", [False, True])
def test_shapes_and_dtypes_are_those_of_the_inputs(
    dtype: torch.dtype, visible: Visible, num_queries: int, num_keys: int, num_kv_heads: int, heads_last: bool
) -> None:
    kernel = block_kernel(CUDA, dtype)
    q = empty(2, 4, num_queries, 24, dtype=dtype, heads_last=heads_last)
    k, v = (empty(2, num_kv_heads, num_keys, 24, dtype=dtype, heads_last=heads_last) for _ in range(2))
    block = kernel.forward(q, k, v, visible=visible, scale=None)
    assert (block.output.shape, block.output.dtype) == (q.shape, dtype)
    assert (block.logsumexp.shape, block.logsumexp.dtype) == (q.shape[:3], torch.promote_types(dtype, torch.float32))
    grads = kernel.backward(torch.ones_like(block.output), block, visible=visible, scale=0.3)
    assert [(grad.shape, grad.dtype) for grad in grads] == [(tensor.shape, dtype) for tensor in (q, k, v)]


@pytest.mark.parametrize(
    ("dtype", "operator"),
    [
        (torch.float32, "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, "_scaled_dot_product_flash_attention"),
        (torch.float16, "_scaled_dot_product_flash_attention"),
    ],
    ids=str,
)
def test_each_block_runs_in_the_fused_operators_of_its_dtype(dtype: torch.dtype, operator: str) -> None:
    kernel = block_kernel(CUDA, dtype)
    for visible, num_queries, num_keys in BLOCKS:
        q, k, v = (
            empty(2, 4, length, 8, dtype=dtype, heads_last=False) for length in (num_queries, num_keys, num_keys)
        )
        with CalledOperators() as called:
            block = kernel.forward(q, k, v, visible=visible, scale=None)
            kernel.backward(block.output, block, visible=visible, scale=None)
        assert called.names == {operator, f"{operator}_backward"}


FLASH = r"flash attention on CUDA needs a head dim that is a multiple of 8 and at most 256, but got"
EFFICIENT = r"memory-efficient attention on CUDA needs a head dim that is a multiple of 4 in torch\.float32, but got"
REFUSED = [
    (torch.bfloat16, 20, rf"{FLASH} 20; use torch\.float32 for this model\.$"),
    (torch.float16, 264, rf"{FLASH} 264; use torch\.float32 for this model\.$"),
    (torch.float32, 6, rf"{EFFICIENT} 6; change the model's head dim\.$"),
]


@pytest.mark.parametrize(("dtype", "head_dim", "says"), REFUSED, ids=str)
def test_a_head_dim_that_an_operator_does_not_take_is_refused(dtype: torch.dtype, head_dim: int, says: str) -> None:
    q = torch.empty(1, 1, 3, head_dim, dtype=dtype, device="meta")
    with pytest.raises(UnsupportedError, match=f"^attention: {says}"):
        block_kernel(CUDA, dtype).forward(q, q, q, visible="all", scale=None)


@pytest.mark.parametrize(("dtype", "head_dim", "says"), REFUSED, ids=str)
def test_a_head_dim_is_refused_before_the_first_forward(dtype: torch.dtype, head_dim: int, says: str) -> None:
    shape = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype, device=CUDA, fqn="layer")
    with pytest.raises(UnsupportedError, match=f"^layer: {says}"):
        AllGatherStrategy().validate(None, shape)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 8), (torch.float16, 256), (torch.float32, 4), (torch.float64, 5)], ids=str
)
def test_the_outermost_head_dims_are_taken(dtype: torch.dtype, head_dim: int) -> None:
    block_kernel(CUDA, dtype).check_head_dim(head_dim)
