"""No tensor as large as local queries times sequence is ever made, forward or backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_core import AttentionMeta, SequenceLayout, local_attention

LOCAL, LENGTH, HEAD_DIM = 1024, 4096, 4
POSITIONS = {
    "contiguous": [*range(LENGTH - LOCAL, LENGTH)],
    "zigzag": [*range(LOCAL // 2), *range(LENGTH - LOCAL // 2, LENGTH)],
}


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


def inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 1, length, HEAD_DIM, requires_grad=True) for length in (LOCAL, LENGTH, LENGTH)]


def ours(positions: list[int], causal: bool) -> Callable[[], None]:
    layout = SequenceLayout(global_index=torch.tensor(positions), global_length=LENGTH, padded_length=LENGTH)
    q, k, v = inputs()
    return lambda: local_attention(q, k, v, attention_meta=AttentionMeta(layout=layout, causal=causal)).sum().backward()


def with_scores() -> None:
    q, k, v = inputs()
    with sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, k, v).sum().backward()


def largest_output(step: Callable[[], None]) -> int:
    with LargestOutput() as largest:
        step()
    return largest.num_elements


def largest_allocation(step: Callable[[], None]) -> int:
    """Return the bytes of the largest single allocation, those inside operators included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def test_the_measures_see_a_matrix_of_scores() -> None:
    assert largest_output(with_scores) == LOCAL * LENGTH
    assert largest_allocation(with_scores) >= 4 * LOCAL * LENGTH


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_no_operation_returns_a_matrix_of_scores(positions: list[int], causal: bool) -> None:
    assert largest_output(ours(positions, causal)) <= LENGTH * HEAD_DIM


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_no_allocation_holds_a_matrix_of_scores(positions: list[int], causal: bool) -> None:
    # The kernel's own block of scores, 256 x 512 fp32 per thread, is what remains.
    assert largest_allocation(ours(positions, causal)) < 4 * LOCAL * LENGTH / 4
