"""The batch contract on one rank: the definition that shards must agree with."""

from typing import Any

import pytest
import torch

from cp_core import AllGatherStrategy, InvalidInputError, SequenceLayout, shard_batch_for_cp, unshard_sequence

IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])


class MultipleOf:
    """A padding rule, as a strategy has one."""

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def padding_multiple(self, cp_size: int) -> int:
        return self.multiple * cp_size


def test_one_rank_keeps_the_whole_batch() -> None:
    found = shard_batch_for_cp({"input_ids": IDS, "labels": IDS}, None)
    layout = found.pop("cp_layout")
    assert layout.chunks == ((0, 6),)
    assert {name: value.tolist() for name, value in found.items()} == {
        "input_ids": IDS.tolist(),
        "shift_labels": [[12, 13, 14, 15, 16, -100], [22, 23, 24, 25, 26, -100]],
        "position_ids": [[0, 1, 2, 3, 4, 5]] * 2,
    }


def test_the_given_batch_is_not_changed() -> None:
    batch: dict[str, Any] = {"input_ids": IDS.clone(), "labels": IDS.clone()}
    shard_batch_for_cp(batch, None, multiple_of=4)
    assert set(batch) == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], IDS)


def test_pads_stand_at_the_end_and_predict_nothing() -> None:
    found = shard_batch_for_cp(
        {"input_ids": IDS, "labels": IDS, "inputs_embeds": torch.ones(2, 6, 3)}, None, multiple_of=8
    )
    assert found["input_ids"][:, 6:].tolist() == [[0, 0]] * 2
    assert found["shift_labels"][:, 5:].tolist() == [[-100] * 3] * 2
    assert found["position_ids"][:, 4:].tolist() == [[4, 5, 6, 7]] * 2
    assert found["inputs_embeds"][:, 5:, 0].tolist() == [[1, 0, 0]] * 2
    assert (found["cp_layout"].global_length, found["cp_layout"].padded_length) == (6, 8)


def test_positions_go_on_counting_over_the_pads() -> None:
    given = torch.arange(6)[None] + torch.tensor([[0], [40]])
    found = shard_batch_for_cp({"input_ids": IDS, "position_ids": given}, None, multiple_of=8)
    assert found["position_ids"].tolist() == [[*range(8)], [*range(40, 48)]]


@pytest.mark.parametrize(
    ("strategy", "multiple_of", "padded_length"),
    [
        (None, 1, 6),
        (AllGatherStrategy(), 1, 6),
        (MultipleOf(4), 1, 8),
        ([MultipleOf(4), MultipleOf(5)], 1, 20),
        ([MultipleOf(4), AllGatherStrategy()], 3, 12),
        ([], 5, 10),
    ],
    ids=["none", "all-gather", "one rule", "two rules", "rules and a multiple", "a multiple"],
)
def test_the_padded_length_is_the_least_common_multiple_of_all_rules(
    strategy: Any, multiple_of: int, padded_length: int
) -> None:
    found = shard_batch_for_cp({"input_ids": IDS}, None, strategy=strategy, multiple_of=multiple_of)
    assert found["cp_layout"].padded_length == padded_length


@pytest.mark.parametrize("multiple_of", [0, -2])
def test_a_multiple_below_one_is_refused(multiple_of: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"^multiple_of must be at least 1, but got {multiple_of}\.$"):
        shard_batch_for_cp({"input_ids": IDS}, None, multiple_of=multiple_of)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_a_row_may_have_any_length_from_one_token_on(length: int) -> None:
    ids = torch.arange(2 * length).view(2, length)
    found = shard_batch_for_cp({"input_ids": ids, "labels": ids}, None, multiple_of=4)
    assert found["input_ids"].shape == (2, -(-length // 4) * 4)
    assert torch.equal(found["shift_labels"][:, : length - 1], ids[:, 1:])
    assert set(found["shift_labels"][:, length - 1 :].flatten().tolist()) == {-100}


def test_token_fields_are_contiguous() -> None:
    found = shard_batch_for_cp({"input_ids": IDS, "labels": IDS, "position_ids": torch.arange(6)[None]}, None)
    assert all(value.is_contiguous() for value in found.values() if isinstance(value, torch.Tensor))


def test_embeddings_stay_differentiable() -> None:
    embeds = torch.randn(2, 6, 3, requires_grad=True)
    shard_batch_for_cp({"inputs_embeds": embeds}, None, multiple_of=4)["inputs_embeds"].sum().backward()
    assert embeds.grad is not None
    assert embeds.grad.unique().tolist() == [1.0]


def test_a_sharded_batch_cannot_be_sharded_again() -> None:
    with pytest.raises(InvalidInputError, match="it was sharded before"):
        shard_batch_for_cp(shard_batch_for_cp({"input_ids": IDS}, None), None)


@pytest.mark.parametrize("dim", [1, -2])
def test_unshard_on_one_rank_drops_the_pads(dim: int) -> None:
    layout = shard_batch_for_cp({"input_ids": IDS}, None, multiple_of=8)["cp_layout"]
    x = torch.randn(2, 8, 3)
    assert torch.equal(unshard_sequence(x, dim, None, layout), x[:, :6])


def test_unshard_on_one_rank_restores_global_order() -> None:
    layout = SequenceLayout(global_index=torch.tensor([2, 3, 0, 1]), global_length=3, padded_length=4)
    assert unshard_sequence(torch.tensor([2, 3, 0, 1]), 0, None, layout).tolist() == [0, 1, 2]


def test_unshard_refuses_what_is_no_shard_of_the_layout() -> None:
    layout = shard_batch_for_cp({"input_ids": IDS}, None)["cp_layout"]
    with pytest.raises(
        InvalidInputError, match=r"^dim 1 of a shard must be 6 long as its layout says, but got \(2, 5\)"
    ):
        unshard_sequence(torch.zeros(2, 5), 1, None, layout)
