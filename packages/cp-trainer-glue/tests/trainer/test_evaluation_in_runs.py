"""A run by config evaluates when it says so, on text that it does not train on, and writes what it found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cp_collectives import current_platform
from cp_collectives.testing import RankFailed
from cp_trainer_glue import TextTrainer, load_config
from cp_trainer_glue._data import load_blocks
from cp_trainer_glue._tokenizer import ByteTokenizer

MODEL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
TRAINING_KEYS = {
    "step",
    "loss",
    "valid_tokens",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "peak_memory_bytes",
    "comm_bytes",
}


def write_config(folder: Path, evaluation: dict[str, Any] | None, **axes: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in (("train", range(300)), ("held_out", range(1000, 1010)), ("short", range(2))):
        text = " ".join(f"{number} squared is {number * number}." for number in numbers)
        (folder / f"{name}.txt").write_text(text)
    content: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": {"config": MODEL, "dtype": "float64"},
        "data": {"files": [str(folder / "train.txt")], "seq_length": 60},
        "training": {"train_iters": 5, "global_batch_size": 4, "micro_batch_size": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "accelerator": axes,
        "plan_overrides": [
            {
                "match": "*.self_attn",
                "when": "cp",
                "region_dispatch": False,
                "inner_target": "self",
                "inner_wrapper": "sdpa_hf",
            }
        ],
    }
    if evaluation is not None:
        content["evaluation"] = evaluation
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def make_trainer(path: str) -> TextTrainer:
    platform = current_platform("cpu")
    return TextTrainer(load_config(path), platform, platform.device(0))


def train(path: str) -> None:
    make_trainer(path).train()


def rows_of(path: str) -> list[dict[str, Any]]:
    metrics = Path(load_config(path).output_dir) / "metrics.jsonl"
    return [json.loads(text) for text in metrics.read_text().splitlines()]


def held_out(folder: Path) -> dict[str, Any]:
    return {"files": [str(folder / "held_out.txt")], "every_iters": 2}


@pytest.fixture(scope="module")
def runs(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The rows of the same run on several meshes, and of one without an evaluation."""
    rows = {}
    for name, axes in (("cp1", {}), ("cp2", {"cp_size": 2}), ("cp4", {"cp_size": 4}), ("none", {})):
        folder = tmp_path_factory.mktemp("runs")
        path = write_config(folder, None if name == "none" else held_out(folder), **axes)
        worlds(axes.get("cp_size", 1)).run(train, path)
        rows[name] = rows_of(path)
    return rows


def test_an_evaluation_has_a_row_of_its_own_after_its_step_s(runs: dict[str, Any]) -> None:
    assert [(row["step"], "eval_loss" in row) for row in runs["cp2"]] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (4, True),
        (5, False),
        (5, True),
    ]
    for row in runs["cp2"]:
        assert set(row) == (
            {"step", "eval_loss", "eval_tokens", "eval_samples"} if "eval_loss" in row else TRAINING_KEYS
        )


def test_rows_of_evaluations_are_equal_at_any_cp_size(runs: dict[str, Any]) -> None:
    for cp_rows in (runs["cp2"], runs["cp4"]):
        for row, expected in zip(cp_rows, runs["cp1"], strict=True):
            if "eval_loss" in row:
                assert row == {**expected, "eval_loss": pytest.approx(expected["eval_loss"], rel=1e-12)}
    samples = runs["cp1"][2]["eval_samples"]
    assert samples == sum(len(f"{n} squared is {n * n}. ") for n in range(1000, 1010)) // 60
    assert runs["cp1"][2]["eval_tokens"] == samples * 59


def test_training_rows_are_those_of_a_run_without_evaluations(runs: dict[str, Any]) -> None:
    measured = ("tokens_per_second", "peak_memory_bytes")
    trained = [{k: v for k, v in row.items() if k not in measured} for row in runs["cp1"] if "loss" in row]
    assert trained == [{k: v for k, v in row.items() if k not in measured} for row in runs["none"]]


def test_a_resumed_run_keeps_the_rows_of_its_evaluations(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, {**held_out(tmp_path), "every_iters": 0})
    worlds(1).run(train, path)
    longer = tmp_path / "longer.yaml"
    longer.write_text(Path(path).read_text().replace("train_iters: 5", "train_iters: 6"))
    worlds(1).run(train, str(longer))
    assert [row["step"] for row in rows_of(path) if "eval_loss" in row] == [5, 6]


def test_an_evaluation_is_shown(worlds: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, held_out(tmp_path))
    text = worlds(1).run(shown, path)[0]
    assert "eval 2/5  loss " in text
    assert f"over {rows_of(path)[2]['eval_tokens']:,} tokens of {rows_of(path)[2]['eval_samples']} samples" in text


def shown(path: str) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(path)
    return out.getvalue()


# --- which text -----------------------------------------------------------------------------------------------------


def evaluated_and_trained(path: str) -> tuple[torch.Tensor, int, torch.Tensor]:
    trainer = make_trainer(path)
    samples: Any = trainer.evaluation_samples
    trained: Any = trainer.stream._sampler.dataset
    blocks = [torch.stack([block["input_ids"] for block in part]) for part in (samples, trained)]
    return blocks[0], trainer.evaluate().samples, blocks[1]


def test_held_out_samples_are_the_last_blocks_and_not_trained_on(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, {"held_out_samples": 5, "max_samples": 3})
    held, evaluated, trained = worlds(1).run(evaluated_and_trained, path)[0]
    every = load_blocks(load_config(path).data, ByteTokenizer(), tmp_path / "cache", None)
    assert torch.equal(torch.cat([trained, held]), torch.stack([block["input_ids"] for block in every]))
    assert (len(held), evaluated) == (5, 3)


def test_another_number_of_held_out_samples_is_other_data_for_a_checkpoint(worlds: Any, tmp_path: Path) -> None:
    worlds(1).run(train, write_config(tmp_path, {"held_out_samples": 5}))
    with pytest.raises(RankFailed, match="was saved with another held_out_samples: 5, but the config says 6"):
        worlds(1).run(train, write_config(tmp_path, {"held_out_samples": 6}))


def test_held_out_text_shorter_than_a_block_is_refused_with_the_numbers(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, {"files": [str(tmp_path / "short.txt")]}, cp_size=2)
    tokens = len("0 squared is 0. 1 squared is 1.") + 1
    sentence = rf"held-out text has {tokens} tokens, less than one block of data\.seq_length \(60\)"
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(train, path)


def test_holding_everything_out_is_refused_with_the_numbers(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, {"held_out_samples": 1000})
    with pytest.raises(
        RankFailed, match=r"held_out_samples \(1000\) must leave blocks to train on, but the data holds"
    ):
        worlds(1).run(train, path)
