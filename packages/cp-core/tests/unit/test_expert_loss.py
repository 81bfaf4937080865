"""The load-balancing loss on one rank: its formula, and tokens that are no tokens."""

import pytest
import torch

from cp_core import InvalidInputError, SequenceLayout, load_balancing_loss, real_local_tokens

T, E, TOP_K = 7, 5, 2


def logits_of(layers: int, tokens: int = T) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, E, dtype=torch.float64, generator=generator) for _ in range(layers)]


def by_formula(logits: list[torch.Tensor]) -> torch.Tensor:
    rows = torch.cat(logits)
    probabilities = rows.softmax(-1)
    chosen = torch.nn.functional.one_hot(probabilities.topk(TOP_K, -1).indices, E).sum(1).double()
    return E * (chosen.mean(0) * probabilities.mean(0)).sum()


@pytest.mark.parametrize("layers", [1, 3])
def test_it_is_the_formula(layers: int) -> None:
    logits = logits_of(layers)
    assert torch.allclose(load_balancing_loss(logits, top_k=TOP_K, dp_cp_mesh=None), by_formula(logits), rtol=1e-14)


def test_a_pad_changes_nothing() -> None:
    logits, real = logits_of(2), torch.arange(T) < 5
    padded = load_balancing_loss(logits, top_k=TOP_K, dp_cp_mesh=None, real_tokens=real)
    assert torch.allclose(padded, by_formula([layer[:5] for layer in logits]), rtol=1e-14)


def test_probabilities_have_a_gradient_and_choices_have_none() -> None:
    logits = logits_of(1)[0].requires_grad_()
    load_balancing_loss([logits], top_k=TOP_K, dp_cp_mesh=None).backward()
    with torch.no_grad():
        shares = torch.nn.functional.one_hot(logits.softmax(-1).topk(TOP_K, -1).indices, E).sum(1).double().mean(0)
    again = logits.detach().clone().requires_grad_()
    (E * shares * again.softmax(-1).mean(0)).sum().backward()
    assert logits.grad is not None
    assert again.grad is not None
    assert torch.allclose(logits.grad, again.grad, rtol=1e-13)


def test_no_real_token_is_no_loss() -> None:
    logits = logits_of(1)[0].requires_grad_()
    loss = load_balancing_loss([logits], top_k=TOP_K, dp_cp_mesh=None, real_tokens=torch.zeros(T, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_16_bit_logits_are_summed_in_fp32() -> None:
    loss = load_balancing_loss([logits_of(1)[0].bfloat16()], top_k=TOP_K, dp_cp_mesh=None)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("logits", "top_k", "real", "sentence"),
    [
        ([], 1, None, r"router logits \[T, E\] of one shape for each layer and top_k of at most E, but got \[\] and 1"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], 1, None, r"but got \[\(2, 3\), \(2, 4\)\] and 1"),
        ([torch.zeros(2, 3)], 4, None, r"but got \[\(2, 3\)\] and 4"),
        ([torch.zeros(2, 3)], 1, torch.ones(3, dtype=torch.bool), r"real_tokens must be \[T\] = \[2\], but is \[3\]"),
    ],
)
def test_wrong_shapes_are_named(logits: list[torch.Tensor], top_k: int, real: torch.Tensor, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        load_balancing_loss(logits, top_k=top_k, dp_cp_mesh=None, real_tokens=real)


def test_real_tokens_are_neither_filled_up_nor_masked() -> None:
    keys = torch.tensor([[True] * 5, [False, False, True, True, True]])
    layout = SequenceLayout.contiguous(global_length=5, multiple_of=2, cp_size=2, cp_rank=0, real_keys=keys)
    assert real_local_tokens(layout, batch_size=2).tolist() == [[True] * 3, [False, False, True]]
    layout = SequenceLayout.contiguous(global_length=5, multiple_of=2, cp_size=2, cp_rank=1)
    assert real_local_tokens(layout, batch_size=1).tolist() == [[True, True, False]]
