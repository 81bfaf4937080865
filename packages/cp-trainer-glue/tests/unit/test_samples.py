"""Samples are dealt to data-parallel ranks, each once, in equally many forwards; what does not fit is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_core import InvalidInputError
from cp_trainer_glue._samples import agreed_batches, shares_of


def samples(num: int, length: int = 4) -> list[dict[str, torch.Tensor]]:
    ids = [torch.full((length,), number) for number in range(num)]
    return [{"input_ids": one, "labels": one.clone()} for one in ids]


def shares(given: Any, *, rows: int, dp_rank: int = 0, dp_size: int = 1) -> list[Any]:
    meshes: Any = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size, world_mesh=None)
    return list(shares_of(given, rows=rows, meshes=meshes))


@pytest.mark.parametrize("num", range(1, 14))
@pytest.mark.parametrize(("rows", "dp_size"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 4)])
def test_each_sample_is_in_one_share_in_order_and_ranks_have_equally_many(num: int, rows: int, dp_size: int) -> None:
    of_ranks = [shares(samples(num), rows=rows, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    assert len({len(of_rank) for of_rank in of_ranks}) == 1
    forwards = zip(*of_ranks, strict=True)
    found = [int(row[0]) for of_all in forwards for one in of_all for row in one.batch["input_ids"][: one.num_real]]
    assert found == list(range(num))
    assert all(one.batch["input_ids"].shape == (rows, 4) for of_rank in of_ranks for one in of_rank)


def test_filler_rows_have_no_label() -> None:
    for rank in range(2):
        last = shares(samples(5), rows=2, dp_rank=rank, dp_size=2)[-1]
        assert last.num_real == 1 - rank
        assert (last.batch["labels"][last.num_real :] == -100).all()
        assert (last.batch["labels"][: last.num_real] != -100).all()


def test_no_sample_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="there is no sample to evaluate or predict; give at least one"):
        shares([], rows=1)


def test_samples_of_different_lengths_in_one_forward_are_refused_with_both() -> None:
    given = [*samples(1, 4), *samples(1, 5)]
    with pytest.raises(
        InvalidInputError, match=r"sample 1 has \{'input_ids': \[5\].*sample 0 has \{'input_ids': \[4\]"
    ):
        shares(given, rows=2)
    assert [one.batch["input_ids"].shape[1] for one in shares(given, rows=1)] == [4, 5]


def test_a_sample_that_cannot_be_read_is_named() -> None:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 2:
                raise OSError("disk")
            return super().__getitem__(index)

    with pytest.raises(InvalidInputError, match=r"a sample from 2 to 3 cannot be read: OSError\('disk'\)"):
        shares(Broken(samples(4)), rows=2)


def test_a_batch_becomes_its_samples() -> None:
    batch = {"input_ids": torch.arange(6).reshape(2, 3), "labels": torch.arange(6).reshape(2, 3)}
    ((first, second),) = agreed_batches([batch], mesh=None)
    assert first["input_ids"].tolist() == [0, 1, 2]
    assert second["labels"].tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("entry", "found"), [(torch.arange(3), r"\[3\]"), ([0, 1], "list"), (torch.tensor(1), r"\[\]")], ids=str
)
def test_an_entry_without_a_row_for_each_sample_is_refused(entry: Any, found: str) -> None:
    batch = {"input_ids": torch.arange(6).reshape(2, 3), "extra": entry}
    with pytest.raises(InvalidInputError, match=f"a row of extra for each of its 2 samples, but that is {found}"):
        list(agreed_batches([batch], mesh=None))


def test_a_batch_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"needs input_ids \[B, S\] or inputs_embeds"):
        list(agreed_batches([{"labels": torch.zeros(2, 3)}], mesh=None))
