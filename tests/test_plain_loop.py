"""The loop of examples/plain_loop.py, which knows cp-core alone: short, and the same on any number of ranks."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[1] / "examples" / "plain_loop.py"
NUM_STEPS = 6


def trained() -> tuple[list[float], dict[str, torch.Tensor]]:
    spec = importlib.util.spec_from_file_location("plain_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_default_dtype(torch.float64)
    try:
        losses, model = module.train(dist.init_device_mesh("cpu", (dist.get_world_size(),)), NUM_STEPS)
    finally:
        torch.set_default_dtype(torch.float32)
    return losses, model.state_dict()


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_the_loop_is_its_own_on_one_rank(worlds: Any, cp_size: int) -> None:
    ((losses, parameters),) = worlds(1).run(trained)
    assert len(losses) == NUM_STEPS
    for found, state in worlds(cp_size).run(trained):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, tensor in parameters.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_the_loop_runs_as_it_says() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, str(EXAMPLE)], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = (float(word) for word in done.stdout.splitlines()[0].split()[3::2])
    assert last < first - 1


def test_the_loop_is_at_most_30_lines_and_knows_cp_core_alone() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert function.end_lineno is not None
    assert function.end_lineno - function.lineno + 1 <= 30
    imported = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert set(imported) == {"pathlib", "torch.nn.functional", "cp_core"}
