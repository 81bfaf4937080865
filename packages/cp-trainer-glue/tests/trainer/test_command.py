"""`cp-train` as a user sees it: exit statuses, one message and no traceback, Ctrl-C, a killed rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIG: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "qwen3_moe",
            "vocab_size": 257,
            "hidden_size": 16,
            "intermediate_size": 16,
            "moe_intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        }
    },
    "data": {"seq_length": 32},
    "training": {"train_iters": 3, "global_batch_size": 1},
    "optimizer": {"lr": 0.01},
    "accelerator": {"cp_size": 2},
    "plan_overrides": [
        {"match": "*.self_attn", "when": "cp", "region_dispatch": False, "inner_wrapper": "sdpa_hf"},
    ],
}
COMMAND = [sys.executable, "-m", "cp_trainer_glue", "run"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("All work and no play. " * 100)
    content = {**CONFIG, "output_dir": str(tmp_path / "run"), "data": {**CONFIG["data"], "files": [str(text)]}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False, env=environment
    )


def test_a_run_trains_saves_and_says_so(config: Path, tmp_path: Path) -> None:
    done = run(str(config))
    assert done.returncode == 0, done.stderr
    assert "step 3/3  loss" in done.stdout
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    again = run(str(config))
    assert again.returncode == 0, again.stderr
    assert "train_iters (3) is reached; nothing to do." in again.stdout


def test_a_fault_of_the_config_starts_no_rank(config: Path) -> None:
    done = run(str(config), "--set", "training.trian_iters=3", "--set", "accelerator.pp_size=2")
    assert done.returncode == 2
    assert "training.trian_iters: unknown key; did you mean 'train_iters'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_number_of_ranks_is_refused(config: Path) -> None:
    done = run(str(config), "--nproc", "3")
    assert done.returncode == 2
    assert "--nproc is 3, but the accelerator sizes" in done.stderr


def test_a_fault_that_all_ranks_find_is_said_once(config: Path) -> None:
    done = run(str(config), "--set", "plan_overrides=[]")
    assert done.returncode == 1
    assert done.stderr.count("1 of 1 attentions have no context-parallel method") == 1
    assert "Traceback" not in done.stderr


def started(config: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a long run and return once it has made steps."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    command = [*COMMAND, str(config), "--set", "training.train_iters=100000", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    metrics = config.parent / "run" / "metrics.jsonl"
    until = time.monotonic() + 90
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.1)
    return process


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in listed.stdout.split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_run_saves_and_says_how_to_go_on(config: Path, number: signal.Signals) -> None:
    process = started(config)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "the same command goes on from here." in out
    assert "Traceback" not in err
    last = int((config.parent / "run/checkpoints/latest").read_text().removeprefix("step-"))
    assert json.loads((config.parent / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == last


def test_a_killed_rank_ends_the_run_with_its_name(config: Path) -> None:
    process = started(config)
    victims = [pid for pid in ranks_of(process) if "RANK=1" in Path(f"/proc/{pid}/environ").read_text().split("\0")]
    os.kill(victims[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL." in err
