"""A fault that one rank alone sees stops all ranks with that rank's message, and none waits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from cp_collectives import current_platform
from cp_trainer_glue import TextTrainer, load_config
from cp_trainer_glue._worker import agreed_config

CONFIG: dict[str, Any] = {
    "output_dir": "runs/x",
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 257,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
    },
    "data": {"source": "stdlib", "seq_length": 16},
    "training": {"train_iters": 1, "global_batch_size": 1},
    "optimizer": {"lr": 0.1},
    "accelerator": {"cp_size": 2},
    "plan_overrides": [{"match": "*.self_attn", "when": "cp", "region_dispatch": False, "inner_wrapper": "sdpa_hf"}],
}
CPU = torch.device("cpu")


def written(path: Path, changes: dict[str, Any]) -> str:
    content = copy.deepcopy(CONFIG)
    for place, value in changes.items():
        *parents, last = place.split(".")
        section: Any = content
        for parent in parents:
            section = section[int(parent)] if isinstance(section, list) else section[parent]
        section[last] = value
    path.write_text(yaml.safe_dump(content))
    return str(path)


def agree_on(paths: list[str]) -> str:
    try:
        agreed_config(paths[dist.get_rank()], (), CPU)
    except ValueError as error:
        return str(error)
    return "agreed"


ONE_RANK = {
    "a misspelt key": ({"training.train_itres": 1}, "training.train_itres: unknown key; did you mean 'train_iters'?"),
    "a dead glob": ({"plan_overrides.0.match": "*.attn"}, "plan_overrides.0 ('*.attn') matches no module"),
    "a module that is not there": (
        {"plan_overrides.0.inner_wrapper": {"_target_": "only_on_rank_0.wrapper"}},
        "there is no module 'only_on_rank_0'; install its package, or start in the folder that holds it, on every ",
    ),
    "another world": ({"accelerator.cp_size": 3}, "multiply to 3 ranks"),
    "another family": ({"model.config.model_type": "lama"}, "knows no model type 'lama'. Did you mean 'llama'?"),
}


@pytest.mark.parametrize(("changes", "sentence"), ONE_RANK.values(), ids=ONE_RANK.keys())
def test_a_fault_of_one_ranks_file_stops_all(
    worlds: Any, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    paths = [written(tmp_path / "0.yaml", {}), written(tmp_path / "1.yaml", changes)]
    first, second = worlds(2).run(agree_on, paths)
    assert first == second
    assert first.startswith(f"rank 1: {paths[1]}: 1 fault") or "2 faults" in first
    assert sentence in first


def test_a_file_that_one_rank_lacks_stops_all(worlds: Any, tmp_path: Path) -> None:
    paths = [str(tmp_path / "absent.yaml"), written(tmp_path / "1.yaml", {})]
    first, second = worlds(2).run(agree_on, paths)
    assert first == second == f"rank 0: {paths[0]}: 1 fault\n  - cannot be read: No such file or directory."


def test_a_fault_of_all_is_said_once(worlds: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "run.yaml", {"training.train_itres": 1})
    first, second = worlds(2).run(agree_on, [path, path])
    assert first == second
    assert first.startswith(f"{path}: 1 fault")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer.lr": 0.2}, "differs from rank 0 in optimizer: optimizer is {'name': 'adamw', 'lr': 0.1,"),
        ({"training.seed": 1, "data.seq_length": 32}, "differs from rank 0 in data, training: data is {"),
    ],
)
def test_ranks_that_read_different_configs_are_refused(
    worlds: Any, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    paths = [written(tmp_path / "0.yaml", {}), written(tmp_path / "1.yaml", changes)]
    first, second = worlds(2).run(agree_on, paths)
    assert first == second
    assert first.startswith("all ranks must read the same config, but rank 1 ")
    assert sentence in first


def test_equal_configs_are_agreed_on(worlds: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "run.yaml", {})
    assert worlds(2).run(agree_on, [path, path]) == ["agreed", "agreed"]


FAILS_ON_RANK_1 = """
from cp_wrappers import inner_wrapper


@inner_wrapper
def wrapper(target_module, mesh, tp_mesh, cp_mesh, ep_mesh):
    if cp_mesh.get_local_rank() == 1 and target_module.layer_idx == 1:
        raise RuntimeError("no rotary table")
    original = target_module.forward
    return lambda *args, **kwargs: original(*args, **kwargs)
"""


def train(path: str, folder: str) -> str:
    import sys

    sys.path.insert(0, folder)
    try:
        TextTrainer(load_config(path), current_platform("cpu"), CPU)
    except ValueError as error:
        return str(error)
    finally:
        sys.path.remove(folder)
    return "trained"


def test_a_users_wrapper_that_fails_on_one_rank_stops_all(worlds: Any, tmp_path: Path) -> None:
    (tmp_path / "fails_on_rank_1.py").write_text(FAILS_ON_RANK_1)
    text = tmp_path / "text.txt"
    text.write_text("All work and no play. " * 20)
    changes = {
        "plan_overrides.0.inner_wrapper": "fails_on_rank_1.wrapper",
        "data": {"files": [str(text)], "seq_length": 16},
        "output_dir": str(tmp_path / "run"),
    }
    first, second = worlds(2).run(train, written(tmp_path / "run.yaml", changes), str(tmp_path))
    assert first == second
    assert first.startswith(
        "rank 1: model.layers.1.self_attn: inner_wrapper 'fails_on_rank_1.wrapper' failed: RuntimeError: no rotary "
    )
