"""Text becomes token blocks, the same everywhere; each data-parallel rank reads its own samples, once per epoch."""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cp_core import InvalidInputError
from cp_trainer_glue._config import DataConfig, TrainingConfig
from cp_trainer_glue._data import BatchStream, TokenBlocks, load_blocks
from cp_trainer_glue._text import documents
from cp_trainer_glue._tokenizer import ByteTokenizer, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def stream(num_blocks: int, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1) -> BatchStream:
    blocks = TokenBlocks(np.arange(num_blocks * 2, dtype=np.int32), 2)
    training = TrainingConfig(train_iters=1, global_batch_size=8, micro_batch_size=micro_batch_size)
    meshes: Any = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size)
    return BatchStream(blocks, training, meshes)


def samples(one: BatchStream, count: int) -> list[int]:
    """Return the numbers of the next samples; block n holds tokens 2n and 2n + 1."""
    return [int(batch["input_ids"][0, 0]) // 2 for batch in itertools.islice(one, count)]


def test_bytes_are_ids_and_documents_end_with_256(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hé")
    (tmp_path / "b.txt").write_text("xyz")
    config = DataConfig(files=(f"{tmp_path}/*.txt",), seq_length=2)
    blocks = load_blocks(config, ByteTokenizer(), tmp_path / "cache", None)
    assert [block["input_ids"].tolist() for block in blocks] == [[104, 195], [169, 256], [120, 121], [122, 256]]
    assert blocks[0]["labels"].tolist() == [104, 195]


def test_the_standard_library_is_tens_of_megabytes_in_one_order(tmp_path: Path) -> None:
    config = DataConfig(source="stdlib", seq_length=2)
    first, second = (list(itertools.islice(documents(config, tmp_path), 20)) for _ in range(2))
    assert first == second
    assert sum(map(len, documents(config, tmp_path))) > 10_000_000


def test_rows_of_json_lines_and_parquet_are_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in ("one", "two")))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["three"]}), tmp_path / "rows.parquet")
    files = (f"{tmp_path}/*.jsonl", f"{tmp_path}/*.parquet")
    config = DataConfig(files=files, text_field="body", seq_length=2)
    assert list(documents(config, tmp_path / "cache")) == ["one", "two", "three"]


def test_a_glob_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"nothing\*' matches no file"):
        list(documents(DataConfig(files=("nothing*",), seq_length=2), tmp_path))


def test_a_missing_text_field_lists_the_fields(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"body": "one"}\n')
    config = DataConfig(files=(f"{tmp_path}/rows.jsonl",), seq_length=2)
    with pytest.raises(InvalidInputError, match=r"has no field 'text', only body; set data\.text_field"):
        list(documents(config, tmp_path / "cache"))


def test_a_tokenizer_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"data\.tokenizer: cannot load 'no/such/folder'"):
        make_tokenizer("no/such/folder")


def test_each_sample_comes_once_per_epoch_over_all_data_parallel_ranks() -> None:
    seen = Counter(number for rank in range(2) for number in samples(stream(10, dp_rank=rank, dp_size=2), 10))
    assert seen == Counter(dict.fromkeys(range(10), 2))


def test_epochs_are_shuffled_differently_and_by_the_seed_alone() -> None:
    twice = samples(stream(10), 20)
    assert sorted(twice[:10]) == sorted(twice[10:]) == list(range(10))
    assert twice[:10] != twice[10:]
    assert twice == samples(stream(10), 20)


@pytest.mark.parametrize("consumed", [0, 3, 10, 13])
def test_a_stream_goes_on_exactly_where_it_was_saved(consumed: int) -> None:
    expected = samples(stream(10), 25)
    first = stream(10)
    iterator = iter(first)
    for _ in range(consumed):
        next(iterator)
    second = stream(10)
    second.load_state_dict(first.state_dict())
    assert samples(second, 25 - consumed) == expected[consumed:]


def test_a_stream_leaves_the_random_numbers_of_the_model_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    samples(stream(4), 10)
    assert torch.equal(torch.rand(3), expected)


def test_too_little_text_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidInputError, match=r"holds 3 blocks of seq_length, but .* needs 4"):
        stream(3, dp_size=2, micro_batch_size=2)
