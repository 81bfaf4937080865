"""transformers' Trainer over ranks that share sequences is the Trainer of one process: examples/hf_trainer.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLE, DRIVER = ROOT / "examples" / "hf_trainer.py", ROOT / "tests" / "hf_trainer_driver.py"
MAX_OWN_LINES = 40


def launch(folder: Path, num_ranks: int, *arguments: str) -> str:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(torchrun if num_ranks else []), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=[(1, 2), (2, 2)], ids=["cp2", "dp2-cp2"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    replicas, cp_size = request.param
    folder = tmp_path_factory.mktemp("hf_trainer")
    launch(folder, 0, str(DRIVER), str(replicas), "alone")
    launch(folder, replicas * cp_size, str(DRIVER), str(replicas), "ranks")
    return torch.load(folder / "alone.0"), [torch.load(folder / f"ranks.{rank}") for rank in range(replicas * cp_size)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", ["plain", "accumulated", "clipped", "one micro-batch over"])
def test_trainer_over_ranks_is_trainer_of_one_process(results: Any, case: str) -> None:
    expected = results[0][case]
    for rank in results[1]:
        found = rank[case]
        assert found["steps"] == expected["steps"]
        for step, expected_step in zip(found["gradients"], expected["gradients"], strict=True):
            assert max(relative(step[name], gradient) for name, gradient in expected_step.items()) < 1e-10
        assert max(relative(found["parameters"][n], p) for n, p in expected["parameters"].items()) < 1e-10
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)  # Trainer keeps losses in fp32
        for line, expected_line in zip(found["logs"], expected["logs"], strict=True):
            assert line["learning_rate"] == expected_line["learning_rate"]
            assert line["epoch"] == expected_line["epoch"]
            assert line["grad_norm"] == pytest.approx(expected_line["grad_norm"], rel=1e-10)
            assert line["loss"] == pytest.approx(expected_line["loss"], rel=1e-6)


def test_all_ranks_end_with_the_same_parameters(results: Any) -> None:
    first, *others = [rank["plain"]["parameters"] for rank in results[1]]
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


def test_the_example_trains(tmp_path: Path) -> None:
    words = launch(tmp_path, 2, str(EXAMPLE), str(tmp_path / "run")).splitlines()[-1].split()
    first_loss, last_loss = float(words[1]), float(words[3].strip(","))  # "loss 4.712 -> 3.230, evaluated 3.222"
    assert last_loss < 0.8 * first_loss


def test_a_user_adds_at_most_forty_lines() -> None:
    text = EXAMPLE.read_text()
    own = text[text.index("class ContextParallelTrainer") : text.index("# --- the script")]
    assert len([line for line in own.splitlines() if line.strip()]) <= MAX_OWN_LINES
