"""`cp-train plan`: what a config would run, to read and as JSON, at any number of ranks."""

import copy
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from cp_trainer_glue._inspection import inspect_config
from cp_trainer_glue._plan_report import plan_report
from cp_trainer_glue._plan_view import show_plan
from cp_trainer_glue._planner import PlanCheck
from cp_trainer_glue.cli import main
from cp_wrappers import MethodDeclaration, plan_boundaries

CONFIG: dict[str, Any] = {
    "output_dir": "runs/x",
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 257,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    },
    "data": {"source": "stdlib", "seq_length": 30},
    "training": {"train_iters": 4, "global_batch_size": 8, "micro_batch_size": 2},
    "optimizer": {"lr": 0.1},
    "accelerator": {"cp_size": 4, "dp_replicate_size": 2},
    "plan_overrides": [
        {"match": "*.[01].self_attn", "when": "cp", "region_dispatch": False, "inner_wrapper": "sdpa_hf"},
        {
            "match": "model.layers.2",
            "when": "cp",
            "region_dispatch": False,
            "inner_target": "self_attn",
            "inner_wrapper": "sdpa_hf",
        },
    ],
}


@pytest.fixture(autouse=True)
def path_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts the current folder on it, which other tests must not see."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def plan(tmp_path: Path, config: dict[str, Any], *options: str) -> int:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(path), "--device", "cpu", *options])
    return int(ended.value.code or 0)


def report_of(tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert plan(tmp_path, config, "--json", *options) == 0
    return json.loads(capsys.readouterr().out)


def test_the_text_says_ranks_methods_padding_and_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, CONFIG) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "8 ranks on cpu",
        "dp_replicate 2 4 0 4 | 1 5 | 2 6 | 3 7",
        "cp 4 2 0 1 2 3 | 4 5 6 7",
        "dp_cp 8 1 0 1 2 3 4 5 6 7",
        "30 tokens + 2 pads = 32 (a multiple of 4), 8 on each rank; 2 x 2 samples per step and data-parallel rank",
        "model.layers.0.self_attn ... model.layers.1.self_attn (2) LlamaAttention sdpa_hf plan_overrides.0 "
        "(*.[01].self_attn)",
        "model.layers.2.self_attn LlamaAttention sdpa_hf plan_overrides.1 (model.layers.2)",
    ):
        assert line in lines
    costs = [line for line in lines if line.startswith(("as declared ", "sdpa_hf "))]
    assert [line.split()[:-1] for line in costs[:4]] != []
    assert len(costs) == 8


def test_the_json_holds_every_group_and_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, CONFIG, capsys)
    assert report["axes"] == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 4, "tp": 1}
    assert report["groups"]["cp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert report["sequence"]["padded_length"] == 32
    assert [row["entry"] for row in report["attentions"]] == ["plan_overrides.0"] * 2 + ["plan_overrides.1"]
    assert report["faults"] == []
    gathered = next(row for row in report["methods"] if row["name"] == "sdpa_hf")
    assert gathered["legal"] is True
    assert gathered["ranks"] == report["declared"]["ranks"]
    for rank, cost in enumerate(gathered["ranks"]):
        assert cost["cp_rank"] == rank
        assert (cost["forward_messages"], cost["backward_messages"]) == (3, 3)
        # 3 layers, 2 * B * Nkv * D * L * (C - 1) * itemsize
        assert cost["forward_bytes"] == cost["backward_bytes"] == 3 * 2 * 2 * 2 * 16 * 8 * 3 * 4
        assert cost["visible_entries"] == 3 * 2 * 4 * sum(range(8 * rank + 1, min(8 * rank + 8, 30) + 1))


class HandWritten(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def test_heads_that_nobody_declared_are_said_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    inspection = inspect_config(path)
    model: Any = torch.nn.Sequential(HandWritten(), HandWritten())
    declarations = [
        MethodDeclaration(match="0", inner_wrapper="sdpa_hf"),
        MethodDeclaration(match="1", inner_wrapper={"_target_": "sdpa_hf", **HEADS}),
    ]
    plans = plan_boundaries(model, declarations, cp_size=4)
    inspection.model, inspection.check = model, PlanCheck(boundaries=tuple(plans), faults=())
    report = plan_report(inspection, torch.device("cpu"))
    unknown = "attentions whose heads are not known before the first forward; declare them as data of the wrapper"
    assert report.declared is not None and report.declared.note == f"without 1 {unknown}"
    assert report.declared.ranks[0].forward_messages == 1
    gathered = next(row for row in report.methods if row.name == "sdpa_hf")
    assert (gathered.serves, gathered.ranks, gathered.note) == (2, (), f"no costs: 2 {unknown}")
    shown = io.StringIO()
    show_plan(report, Console(width=300, file=shown))
    assert f"no costs: 2 {unknown}" in shown.getvalue()


def test_the_json_goes_into_a_file_beside_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, CONFIG, "--json", str(tmp_path / "plan.json")) == 0
    assert "8 ranks on cpu" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["world_size"] == 8


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, CONFIG, "--json", str(tmp_path / "no" / "plan.json")) == 2
    assert "error: --json: cannot write" in capsys.readouterr().err


def test_a_wrong_config_is_explained_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = copy.deepcopy(CONFIG)
    config["plan_overrides"].pop()
    config["training"]["train_itres"] = 3
    assert plan(tmp_path, config, "--json") == 2
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert [row["wrapper"] for row in report["attentions"]] == ["sdpa_hf", "sdpa_hf", None]
    assert len(report["faults"]) == 2
    assert yaml.safe_load(report["correction"]["pasted"])["training"]["train_iters"] == 4
    assert "error: " in captured.err


def test_a_method_that_cannot_serve_says_why_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = copy.deepcopy(CONFIG)
    config["model"]["config"]["attention_dropout"] = 0.1
    assert plan(tmp_path, config) == 2
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    refused = next(line for line in lines if line.startswith("sdpa_hf 0 of 3"))
    assert "model.layers.0.self_attn: attention_dropout=0.1 is not supported" in refused


def test_a_plan_for_gpus_needs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, CONFIG, "--device", "cuda") == 0
    assert "8 ranks on cuda" in capsys.readouterr().out


def test_what_a_kernel_does_not_take_is_a_fault_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = copy.deepcopy(CONFIG)
    config["model"]["config"]["hidden_size"] = 24
    assert plan(tmp_path, config, "--device", "cuda") == 2
    refusal = "model.layers.0.self_attn: memory-efficient attention on CUDA needs a head dim that is a multiple of 4"
    assert f"{refusal} in torch.float32, but got 6;" in capsys.readouterr().err


def test_a_device_that_torch_does_not_know_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, CONFIG, "--device", "npu") == 2
    assert "--device npu: torch does not know this device type here" in capsys.readouterr().err


def test_cp_size_1_has_no_method_and_no_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "accelerator": {"cp_size": 1}}
    report = report_of(tmp_path, config, capsys)
    assert [row["wrapper"] for row in report["attentions"]] == [None] * 3
    assert report["declared"] is None
    assert plan(tmp_path, config) == 0
    assert "none needed at cp_size 1" in capsys.readouterr().out
    assert report["methods"] == []


USERS = """
from cp_wrappers import inner_wrapper


@inner_wrapper
def own(target_module, mesh, tp_mesh, cp_mesh, ep_mesh):
    return lambda *args, **kwargs: None
"""


def test_a_users_wrapper_is_listed_and_its_costs_are_not_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan_users.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    config = copy.deepcopy(CONFIG)
    config["plan_overrides"][1]["inner_wrapper"] = {"_target_": "plan_users.own"}
    report = report_of(tmp_path, config, capsys)
    assert [row["wrapper"] for row in report["attentions"]] == ["sdpa_hf", "sdpa_hf", "plan_users.own"]
    assert report["declared"]["note"] == "without 1 attentions whose method communicates by itself"
    assert report["declared"]["ranks"][0]["forward_messages"] == 2


@pytest.mark.parametrize(
    "accelerator",
    [{"cp_size": 16384}, {"cp_size": 8, "dp_replicate_size": 2048}, {"cp_size": 256, "dp_replicate_size": 64}],
    ids=["one group", "many groups", "both"],
)
def test_16384_ranks_are_planned_in_20_seconds_and_2_gigabytes(tmp_path: Path, accelerator: dict[str, int]) -> None:
    config = copy.deepcopy(CONFIG)
    config["accelerator"] = accelerator
    config["data"]["seq_length"] = 1_000_000
    config["training"]["global_batch_size"] = 2 * accelerator.get("dp_replicate_size", 1)
    config["model"]["config"] |= {"num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64}
    config["plan_overrides"] = [{**config["plan_overrides"][0], "match": "*.self_attn"}]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "cp_trainer_glue", "plan", str(path), "--device", "cpu"]
    started = time.monotonic()
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen([*command, "--json", str(tmp_path / "plan.json")], stdout=out, stderr=out)
        _, status, usage = os.wait4(process.pid, 0)  # what this process used, whatever others used before
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - started
    assert process.returncode == 0, (tmp_path / "out").read_text()
    assert "16384 ranks on cpu" in (tmp_path / "out").read_text()
    report = json.loads((tmp_path / "plan.json").read_text())
    assert sum(len(group) for group in report["groups"]["cp"]) == 16384
    assert len(report["declared"]["ranks"]) == accelerator["cp_size"]
    assert seconds < 20
    assert usage.ru_maxrss * 1024 < 2e9
