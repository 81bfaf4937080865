"""The checks of the `layers` session see a planted fault, and the sources pass them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import check_devices
import check_ranges
import consumer_check

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the packages and the root's settings, to plant faults in."""
    ignored = shutil.ignore_patterns("__pycache__", "tests", "*.egg-info")
    shutil.copytree(ROOT / "packages", tmp_path / "packages", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_ranges_of_the_sources_are_right() -> None:
    assert check_ranges.faults(ROOT) == []


def test_a_version_outside_a_range_is_found(checkout: Path) -> None:
    manifest = checkout / "packages/cp-core/pyproject.toml"
    manifest.write_text(manifest.read_text().replace('version = "0.1.0"', 'version = "0.3.0"'))
    found = check_ranges.faults(checkout)
    assert "cp-wrappers asks for cp-core<0.2,>=0.1, but cp-core is 0.3.0." in found


def test_a_missing_range_is_found(checkout: Path) -> None:
    manifest = checkout / "packages/cp-core/pyproject.toml"
    manifest.write_text(manifest.read_text().replace('"cp-collectives>=0.1,<0.2"', '"cp-collectives"'))
    assert check_ranges.faults(checkout) == ["cp-core asks for cp-collectives without a range; write >=X.Y,<X.Z."]


def test_the_sources_name_no_device() -> None:
    assert check_devices.faults(ROOT) == []


@pytest.mark.parametrize("line", ["torch.cuda.synchronize()", "import torch_npu", "backend = 'hccl'", 'x = "nccl"'])
def test_a_device_named_outside_the_platform_is_found(checkout: Path, line: str) -> None:
    append(checkout / "packages/cp-core/src/cp_core/_loss.py", f"\n{line}\n")
    (found,) = check_devices.faults(checkout)
    assert found.endswith(line)


UPWARD = {
    "cp_core imports cp_wrappers": ("cp-core/src/cp_core/_loss.py", "import cp_wrappers"),
    "inside a function": ("cp-core/src/cp_core/_loss.py", "def f() -> None:\n    import cp_wrappers"),
    "for types only": (
        "cp-collectives/src/cp_collectives/_mesh.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cp_core",
    ),
    "siblings": ("cp-trainer-glue/src/cp_trainer_glue/_loss.py", "import cp_models_qwen3moe"),
    "transformers in cp_core": ("cp-core/src/cp_core/_loss.py", "import transformers"),
    "transformers elsewhere in cp_wrappers": ("cp-wrappers/src/cp_wrappers/_boundary.py", "import transformers"),
    "order inside a package": ("cp-core/src/cp_core/_layout.py", "from . import _strategy"),
}


@pytest.mark.parametrize(("file", "line"), UPWARD.values(), ids=UPWARD.keys())
def test_an_import_against_the_order_is_found(checkout: Path, file: str, line: str) -> None:
    append(checkout / "packages" / file, f"\n{line}\n")
    assert run_import_linter(checkout) != 0


def test_the_sources_keep_the_order(checkout: Path) -> None:
    assert run_import_linter(checkout) == 0


def run_import_linter(checkout: Path) -> int:
    sources = [str(path) for path in sorted(checkout.glob("packages/*/src"))]
    code = (
        f"import sys; sys.path[:0] = {sources!r}; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    )
    command = [sys.executable, "-c", code, "--no-cache"]
    code = code.replace("lint_imports())", "lint_imports(no_cache=True))")
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, cwd=checkout, capture_output=True, check=False).returncode


def test_a_consumer_sees_what_came_along_and_what_is_missing() -> None:
    found = consumer_check.faults(["cp-core"], ["yaml"])
    assert "cp-wrappers came along with cp-core." in found
    assert "module yaml came along with cp-core." in found
