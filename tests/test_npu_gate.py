"""Without a usable NPU, `nox -s npu_component` fails with one sentence per cause, and never passes by skipping."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A stand-in for torch_npu: what its import does, and what torch then sees.
PRETENDED = {
    "absent": (None, "torch_npu is not installed"),
    "broken": (
        "raise ImportError('libhccl.so: cannot open shared object file')",
        "torch_npu is installed but broken: libhccl.so: cannot open shared object file; source set_env.sh",
    ),
    "no device": ("", "torch_npu is installed, but there is no NPU device"),
    "too few devices": (
        "import torch\n"
        "torch.accelerator.current_accelerator = lambda check_available=False: torch.device('npu')\n"
        "torch.accelerator.device_count = lambda: 1\n"
        "torch.utils.rename_privateuse1_backend('npu')\n",
        "these tests need 4 NPU devices, but there are 1.",
    ),
    "wrong kernel": (
        "import torch\n"
        "torch.accelerator.current_accelerator = lambda check_available=False: torch.device('npu')\n"
        "torch.accelerator.device_count = lambda: 4\n"
        "torch.utils.rename_privateuse1_backend('npu')\n"
        "torch.Tensor.to = lambda self, device: self * 0\n",
        "a matrix product on the NPU is wrong",
    ),
    "simulator": ("IS_SIMULATOR = True", "simulated runtime, which is no evidence for an NPU"),
}


def pretend(folder: Path, source: str | None) -> dict[str, str]:
    """Return an environment in which `import torch_npu` runs `source`."""
    if source is not None:
        (folder / "torch_npu.py").write_text(source)
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(("source", "sentence"), PRETENDED.values(), ids=PRETENDED.keys())
def test_the_probe_names_each_cause_and_fails(tmp_path: Path, source: str | None, sentence: str) -> None:
    probe = [sys.executable, str(ROOT / "tools" / "npu_probe.py"), "4"]
    done = subprocess.run(probe, env=pretend(tmp_path, source), capture_output=True, text=True, check=False)
    assert done.returncode >= 10, done.stderr
    assert sentence in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_each_cause_has_an_exit_status_of_its_own(tmp_path: Path) -> None:
    statuses = set()
    for name, (source, _) in PRETENDED.items():
        folder = tmp_path / name
        folder.mkdir()
        probe = [sys.executable, str(ROOT / "tools" / "npu_probe.py"), "4"]
        statuses.add(subprocess.run(probe, env=pretend(folder, source), capture_output=True, check=False).returncode)
    assert len(statuses) == len(PRETENDED)


@pytest.mark.parametrize("cause", ["absent", "broken"])
def test_the_session_fails_with_the_sentence_and_skips_nothing(tmp_path: Path, cause: str) -> None:
    source, sentence = PRETENDED[cause]
    command = [sys.executable, "-m", "nox", "--no-venv", "-s", "npu_component(cp-core)", "-f", str(ROOT / "noxfile.py")]
    done = subprocess.run(command, env=pretend(tmp_path, source), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"npu_component(cp-core) needs an NPU: {sentence}" in done.stderr
    assert "skip" not in done.stderr.lower()
