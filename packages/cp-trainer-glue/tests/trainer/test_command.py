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
    assert "the sizes multiply to 2 ranks" in done.stderr
    assert "but --nproc is 3; without dp_replicate_size they multiply to 2, which does not divide 3." in done.stderr


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


def test_torchrun_with_a_config_that_one_rank_reads_differently_ends_with_that_ranks_message(config: Path) -> None:
    other = config.with_name("other.yaml")
    other.write_text(config.read_text().replace("*.self_attn", "*.attention"))
    script = config.with_name("ranked.py")
    script.write_text(
        "import os, sys\nfrom cp_trainer_glue.cli import main\n"
        "main(['run', sys.argv[1 + int(os.environ['RANK'])], '--device', 'cpu'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), str(config), str(other)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=environment,
    )
    assert done.returncode == 1
    assert done.stderr.count("error: rank 1: ") == 1
    assert "plan_overrides.0 ('*.attention') matches no module" in done.stderr
    assert "cp_trainer_glue" not in "".join(line for line in done.stderr.splitlines() if line.startswith("  File"))


def test_a_wrapper_beside_the_config_is_found(config: Path) -> None:
    config.with_name("beside.py").write_text(
        "from cp_wrappers import inner_wrapper\n"
        "from cp_wrappers.wrappers import sdpa_hf_cp_wrapper\n\n\n"
        "@inner_wrapper\n"
        "def mine(target_module, mesh, tp_mesh, cp_mesh, ep_mesh):\n"
        "    return sdpa_hf_cp_wrapper(target_module, mesh, tp_mesh, cp_mesh, ep_mesh)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    script = Path(sys.executable).with_name("cp-train")
    options = ["--set", "plan_overrides.0.inner_wrapper={_target_: beside.mine}", "--set", "training.train_iters=1"]
    for command in ("plan", "run"):
        done = subprocess.run(
            [str(script), command, config.name, *options],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            env=environment,
            cwd=config.parent,
        )
        assert done.returncode == 0, done.stderr
        assert "beside.mine" in done.stdout


@pytest.mark.parametrize(
    ("environment", "options", "sentence"),
    [
        ({"RANK": "0"}, [], "this is a rank of a run, but LOCAL_RANK='', WORLD_SIZE='' is no number"),
        ({"RANK": "abc", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, [], "but RANK='abc' is no number; start ranks with"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, ["--device", "npu"], "--device npu cannot be used here"),
    ],
    ids=["no local rank", "no number", "no such device"],
)
def test_an_environment_that_does_not_fit_is_said(
    config: Path, environment: dict[str, str], options: list[str], sentence: str
) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*COMMAND, str(config), *options],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**clean, **environment},
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
