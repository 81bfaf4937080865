"""`metrics.jsonl` has one line per step, also after a resume."""

import json
from pathlib import Path

from cp_trainer_glue._metrics import MetricsFile, StepMetrics


def line(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=1.0,
        valid_tokens=2,
        grad_norm=3.0,
        lr=0.1,
        tokens_per_second=5.0,
        peak_memory_bytes=6,
        comm_bytes=7,
    )


def steps(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_the_keys_are_those_of_the_document(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "m.jsonl", last_step=0).write(line(1))
    assert list(json.loads((tmp_path / "m.jsonl").read_text())) == [
        "step",
        "loss",
        "valid_tokens",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "peak_memory_bytes",
        "comm_bytes",
    ]


def test_a_resume_drops_the_lines_of_lost_steps(tmp_path: Path) -> None:
    first = MetricsFile(tmp_path / "m.jsonl", last_step=0)
    for step in (1, 2, 3):
        first.write(line(step))
    MetricsFile(tmp_path / "m.jsonl", last_step=2).write(line(3))
    assert steps(tmp_path / "m.jsonl") == [1, 2, 3]


def test_a_fresh_start_begins_a_fresh_file(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "m.jsonl", last_step=0).write(line(1))
    MetricsFile(tmp_path / "m.jsonl", last_step=0).write(line(1))
    assert steps(tmp_path / "m.jsonl") == [1]
