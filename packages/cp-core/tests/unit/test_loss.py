"""The loss contract on one rank."""

from typing import Any

import pytest
import torch

from cp_core import GlobalLoss, InvalidInputError, count_valid_tokens, mean_global_loss, sum_loss_weights


@pytest.mark.parametrize(
    ("labels", "count"),
    [([[1, 2, -100]], 2), ([[-100, -100]], 0), ([[0, -1]], 2), ([[]], 0)],
    ids=["one ignored", "none", "other negative labels count", "empty"],
)
def test_valid_tokens_are_those_that_are_not_ignored(labels: list[list[int]], count: int) -> None:
    found = count_valid_tokens(torch.tensor(labels, dtype=torch.int64))
    assert found == count
    assert type(found) is int


def loss_of(
    loss_sum: float, num_tokens: int, *, degree: int = 1, window: int | None = None
) -> tuple[float, float, float]:
    weight = torch.tensor(loss_sum, dtype=torch.float64, requires_grad=True)
    found = mean_global_loss(
        weight, num_tokens, dp_cp_mesh=None, grad_average_degree=degree, window_valid_tokens=window
    )
    found.backward.backward()
    assert found.valid_tokens == num_tokens
    assert not found.logged.requires_grad
    assert weight.grad is not None
    return found.backward.item(), found.logged.item(), weight.grad.item()


def test_the_mean_is_over_the_valid_tokens() -> None:
    assert loss_of(6.0, 4) == (1.5, 1.5, 0.25)


def test_the_average_of_gradients_is_undone_once_and_not_in_what_is_logged() -> None:
    assert loss_of(6.0, 4, degree=8) == (12.0, 1.5, 2.0)


def test_a_window_divides_by_its_own_count() -> None:
    assert loss_of(6.0, 4, window=12) == (0.5, 0.5, 1 / 12)


def test_no_valid_token_is_a_loss_of_zero_and_no_nan() -> None:
    assert loss_of(0.0, 0) == (0.0, 0.0, 1.0)


def test_logging_does_not_change_the_loss_sum() -> None:
    loss_sum = torch.tensor(3.0)
    mean_global_loss(loss_sum, 3, dp_cp_mesh=None, grad_average_degree=1)
    assert loss_sum.item() == 3.0


def test_a_window_with_fewer_tokens_than_the_call_is_refused_with_both() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^window_valid_tokens \(3\) is less than the 4 valid tokens of this call"
    ):
        loss_of(6.0, 4, window=3)


@pytest.mark.parametrize(
    ("shape", "num_tokens", "degree"), [((2,), 1, 1), ((), -1, 1), ((), 1, 0)], ids=["no scalar", "count", "degree"]
)
def test_what_is_no_loss_is_refused_with_what_was_given(shape: tuple[int, ...], num_tokens: int, degree: int) -> None:
    with pytest.raises(InvalidInputError, match="mean_global_loss needs a scalar loss sum") as caught:
        mean_global_loss(torch.zeros(shape), num_tokens, dp_cp_mesh=None, grad_average_degree=degree)
    assert str(caught.value).endswith(f"but got shape {shape}, {num_tokens} and {degree}.")


def weighted(loss_sum: float, num_tokens: int, weight_sum: float, **options: Any) -> GlobalLoss:
    return mean_global_loss(
        torch.tensor(loss_sum, dtype=torch.float64),
        num_tokens,
        dp_cp_mesh=None,
        local_weight_sum=weight_sum,
        **{"grad_average_degree": 1, **options},
    )


def test_with_weights_the_mean_is_over_the_weights_and_the_count_stays_one_of_tokens() -> None:
    found = weighted(6.0, 40, 0.5, grad_average_degree=2)
    assert (found.backward.item(), found.logged.item(), found.valid_tokens) == (24.0, 12.0, 40)


def test_a_window_of_weights_divides_by_its_own_sum() -> None:
    assert weighted(6.0, 4, 0.5, window_weight_sum=1.5).logged.item() == 4.0


def test_no_weight_is_a_loss_of_zero_and_no_nan() -> None:
    assert weighted(0.0, 4, 0.0).logged.item() == 0.0


def test_a_window_may_be_summed_in_another_order_than_the_call() -> None:
    assert weighted(3.0, 4, 0.3, window_weight_sum=0.3 - 1e-16).logged.item() == pytest.approx(10.0)


@pytest.mark.parametrize("window", [0.49, float("nan"), float("inf")])
def test_a_window_with_less_weight_than_the_call_is_refused_with_both(window: float) -> None:
    with pytest.raises(
        InvalidInputError,
        match=rf"^window_weight_sum \({window}\) must be finite and not less than the weights of this call \(0\.5\)",
    ):
        weighted(6.0, 4, 0.5, window_weight_sum=window)


@pytest.mark.parametrize("weight_sum", [-0.5, float("nan"), float("inf")])
def test_a_weight_sum_that_is_none_is_refused(weight_sum: float) -> None:
    with pytest.raises(
        InvalidInputError, match=f"^local_weight_sum must be finite and at least 0, but got {weight_sum}"
    ):
        weighted(6.0, 4, weight_sum)


def test_a_window_of_the_other_kind_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"is window_valid_tokens; this mean is over weights\.$"):
        weighted(6.0, 4, 0.5, window_valid_tokens=40)
    with pytest.raises(InvalidInputError, match=r"is window_valid_tokens; this mean is over tokens\.$"):
        mean_global_loss(torch.tensor(6.0), 4, dp_cp_mesh=None, grad_average_degree=1, window_weight_sum=9.0)


def test_weights_are_summed_in_float64() -> None:
    # 1 is lost beside 2**24 in float32, and beside 256 in bfloat16.
    assert sum_loss_weights(torch.tensor([[2.0**24, 1.0, 1.0]])) == 2**24 + 2
    assert sum_loss_weights(torch.tensor([[256.0, 1.0, 0.0]], dtype=torch.bfloat16)) == 257.0


@pytest.mark.parametrize("count", [2.5, 2.0, torch.tensor(2.5), None], ids=str)
def test_a_count_that_is_no_integer_is_refused(count: Any) -> None:
    with pytest.raises(InvalidInputError, match="local_valid_tokens must be an integer count of labels, but got"):
        mean_global_loss(torch.tensor(1.0), count, dp_cp_mesh=None, grad_average_degree=1)
    whole: Any = torch.tensor(2)
    assert mean_global_loss(torch.tensor(1.0), whole, dp_cp_mesh=None, grad_average_degree=1).logged == 0.5
