"""Gradients on one rank."""

import pytest
import torch

from cp_core import clip_grad_norm, sum_gradients


def params() -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    found[0].grad, found[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    return found


def test_one_rank_keeps_its_gradients() -> None:
    own = params()
    sum_gradients(own, None)
    assert [None if p.grad is None else p.grad.tolist() for p in own] == [[3.0, 0.0], [4.0], None]


def test_params_may_be_an_iterator() -> None:
    sum_gradients(iter(params()), None)
    assert clip_grad_norm(iter(params()), 1.0).item() == 5.0


@pytest.mark.parametrize(("max_norm", "factor"), [(1.0, 0.2), (10.0, 1.0), (float("inf"), 1.0)])
def test_gradients_are_scaled_down_to_the_norm_and_never_up(max_norm: float, factor: float) -> None:
    own = params()
    norm = clip_grad_norm(own, max_norm)
    assert (norm.shape, norm.item()) == ((), 5.0)
    assert own[0].grad is not None
    assert own[0].grad.tolist() == pytest.approx([3 * factor, 0.0], rel=1e-5)
    assert own[2].grad is None
