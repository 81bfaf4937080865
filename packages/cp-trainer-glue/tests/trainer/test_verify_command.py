"""`cp-train verify` as a user sees it: exit status, words, JSON, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parent / "verified" / "context_parallel.yaml"
WRAPPER_THAT_STAYS_LOCAL = """
from cp_wrappers import inner_wrapper


@inner_wrapper
def local(target_module, mesh, tp_mesh, cp_mesh, ep_mesh):
    before = target_module.forward
    return lambda *args, **kwargs: before(*args, **kwargs)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("All work and no play makes a dull day. " * 100)
    (tmp_path / "beside.py").write_text(WRAPPER_THAT_STAYS_LOCAL)
    return tmp_path


def verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    text = ["--set", "data.source=null", "--set", "data.files=[text.txt]"]
    return subprocess.run(
        [sys.executable, "-m", "cp_trainer_glue", "verify", str(CONFIG), *text, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
        cwd=folder,
    )


def test_a_right_run_is_verified_and_leaves_only_its_json(folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    options = ["--steps", "1", "--layers", "1", "--seq-length", "16"]
    done = verify(folder, *options, "--json", "report.json")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM on 2 ranks (dp 1 x cp 2 x tp 1), beside one device" in done.stdout
    for changed in ("layers: the first 1 of 2", "seq_length: 16 (was 32)", "dtype: float64 (was float32)"):
        assert changed in done.stdout
    content = json.loads((folder / "report.json").read_text())
    assert f"verified: all {len(content['checks'])} comparisons agree with one device." in done.stdout
    assert content["passed"] is True
    assert all({"name", "kind", "error", "passed"} <= set(check) for check in content["checks"])
    assert {path.name for path in folder.iterdir()} - before <= {"report.json", "__pycache__"}


def test_a_wrapper_that_stays_local_is_found_with_layer_token_parameter_and_cause(folder: Path) -> None:
    done = verify(folder, "--set", "plan_overrides.0.inner_wrapper={_target_: beside.local}", "--json")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    content = json.loads(done.stdout)
    assert content["passed"] is False
    assert content["first_layer"] == "model.layers.0.self_attn"
    assert content["first_parameter"] == "model.embed_tokens.weight"
    assert content["first_token"].startswith("token 16 of row 0")
    assert [cause["kind"] for cause in content["causes"]] == ["attention_local"]


def test_a_report_that_cannot_be_written_is_an_error(folder: Path) -> None:
    done = verify(folder, "--steps", "1", "--json", "no/such/folder.json")
    assert done.returncode == 1
    assert "verified: all" in done.stdout
    assert "--json: cannot write 'no/such/folder.json'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_of_the_config_starts_no_rank(folder: Path) -> None:
    done = verify(folder, "--set", "accelerator.pp_size=2")
    assert done.returncode == 2
    assert "pp_size" in done.stderr
