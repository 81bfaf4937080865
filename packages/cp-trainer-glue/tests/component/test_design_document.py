"""The snippets of the design document that this version can serve run as printed; the others are refused by name."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from cp_collectives import current_platform
from cp_core import shard_batch_for_cp, unshard_sequence
from cp_trainer_glue import (
    ModuleShardingSpec,
    PlanOverrideResolver,
    ShardingPlanner,
    TextTrainer,
    apply_sharding_plan,
    load_config,
)
from cp_trainer_glue._applier import ShardingApplier
from cp_trainer_glue._structure import check_structure
from cp_wrappers import register_cp_model_spec, register_inner_wrapper

# --- 3.1, 3.1.1: trainings ----------------------------------------------------------------------------------------

TRAINER_YAML = """
accelerator:
  dp_shard_size: 1
  dp_replicate_size: 1
  tp_size: 1
  cp_size: 2
  ep_size: 1
  pp_size: 1
  sequence_parallel: false
  loss_parallel: false

plan_overrides:
  # HF 风格 forward(hidden_states)，内部调用 F.scaled_dot_product_attention。
  # sdpa_hf 的通信方法由 wrapper 固定，框架不再根据模型结构自动猜测。
  - match: "*.self_attn"
    when: cp
    region_dispatch: false
    inner_target: self
    inner_wrapper: sdpa_hf
"""
COMMON_YAML = """
plan_overrides:
  - match: "*.self_attn"
    when: cp
    region_dispatch: false
    inner_target: self
    inner_wrapper: <按场景替换>
"""
COLOSSAL_YAML = """
inner_wrapper:
  _target_: hyper_parallel.distributed.context_parallel.wrappers.sdpa_hf_cp_wrapper
"""
STANDARD_YAML = """
plan_overrides:
  - match: "*.self_attn"
    when: cp
    region_dispatch: false
    inner_target: self
    inner_wrapper:
      _target_: hyper_parallel.distributed.context_parallel.wrappers.sdpa_hf_cp_wrapper
"""
LATER_YAML = {
    "Ulysses": """
inner_wrapper:
  _target_: hyper_parallel.distributed.context_parallel.wrappers.sdpa_hf_ulysses_cp_wrapper
""",
    "Hybrid": """
inner_wrapper:
  _target_: hyper_parallel.distributed.context_parallel.wrappers.sdpa_hf_hybrid_cp_wrapper
  ulysses_degree: 2
""",
    "async Colossal": """
inner_wrapper:
  _target_: hyper_parallel.models.qwen3_moe.adapter.distributed.context_parallel_async.qwen3_moe_async_colossal_cp_wrapper
""",
    "Head-Tail": """
inner_wrapper:
  _target_: hyper_parallel.distributed.context_parallel.wrappers.sdpa_hf_load_balance_cp_wrapper
""",
}
REST: dict[str, Any] = {
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
    "training": {"train_iters": 2, "global_batch_size": 1},
    "optimizer": {"lr": 0.1},
    "accelerator": {"cp_size": 2},
}


def replaced(scenario: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(COMMON_YAML)
    content["plan_overrides"][0] |= yaml.safe_load(scenario)
    return content


def trained(path: str) -> list[tuple[str, str, str]]:
    trainer = TextTrainer(load_config(path), current_platform("cpu"), torch.device("cpu"))
    trainer.train()
    return [(row.fqn, row.wrapper.rpartition(".")[2], row.source) for row in trainer.applied.report]


@pytest.mark.parametrize(
    "snippet",
    [yaml.safe_load(TRAINER_YAML), replaced(COLOSSAL_YAML), yaml.safe_load(STANDARD_YAML)],
    ids=["3.1", "3.1.1", "3.4"],
)
def test_a_training_of_the_document_runs(worlds: Any, tmp_path: Path, snippet: dict[str, Any]) -> None:
    (tmp_path / "text.txt").write_text("All work and no play. " * 20)
    data = {"files": [str(tmp_path / "text.txt")], "seq_length": 16}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**REST, "data": data, "output_dir": str(tmp_path / "run"), **snippet}))
    for report in worlds(2).run(trained, str(path)):
        assert [(fqn, source) for fqn, _, source in report] == [
            ("model.layers.0.self_attn", "plan_overrides.0"),
            ("model.layers.1.self_attn", "plan_overrides.0"),
        ]
        assert {name for _, name, _ in report} <= {"sdpa_hf", "sdpa_hf_cp_wrapper"}


@pytest.mark.parametrize("scenario", LATER_YAML.values(), ids=LATER_YAML.keys())
def test_a_method_of_a_later_version_is_refused_by_its_path(scenario: str) -> None:
    structure = check_structure({**REST, **replaced(scenario), "data": {"source": "stdlib", "seq_length": 8}})
    overrides = PlanOverrideResolver(structure.sections["plan_overrides"]).resolve(cp_size=2)
    check = ShardingPlanner(overrides).check(llama(), cp_size=2)
    (fault,) = check.faults
    assert "names a wrapper that no installed package has" in fault.message


# --- 3.4: a wrapper of the user's own -----------------------------------------------------------------------------

USERS_WRAPPER = '''
from cp_wrappers import inner_wrapper


@inner_wrapper
def my_cp_attention_wrapper(
    target_module,
    mesh,
    tp_mesh,
    cp_mesh,
    ep_mesh,
):
    """原地替换 target_module.forward；内部明确实现一种 CP 通信方法。"""
    del mesh, tp_mesh, ep_mesh
    original_forward = target_module.forward

    def cp_forward(*args, **kwargs):
        # 1. 解包 local/DTensor 输入；2. 按本 wrapper 的方法通信；
        # 3. 执行 attention；4. 恢复 boundary contract。
        return original_forward(*args, **kwargs)

    target_module.forward = cp_forward
'''
USERS_YAML = """
plan_overrides:
  - match: "*.self_attn"
    when: cp
    region_dispatch: false
    inner_target: core_attention
    inner_wrapper:
      _target_: my_project.cp.my_cp_attention_wrapper
"""


class CoreAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core_attention = CoreAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core_attention(x)


def hand_written() -> torch.nn.Module:
    return torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList(torch.nn.ModuleDict({"self_attn": SelfAttention()}) for _ in range(2))}
    )


def device_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "cp"))


def users_wrapper(folder: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    model, mesh = hand_written(), device_mesh()
    structure = check_structure({**REST, **yaml.safe_load(USERS_YAML)})
    overrides = PlanOverrideResolver(structure.sections["plan_overrides"]).resolve(cp_size=2)
    plan = ShardingPlanner(overrides).plan(model, mesh, cp_size=2)
    applied = ShardingApplier(plan, mesh).apply(model)
    attention = model["layers"][0]["self_attn"]
    found = {
        "names": list(plan.module_specs),
        "replaced": attention.core_attention.__dict__["forward"] is not None,
        "computes": attention(torch.ones(1)).item(),
    }
    applied.remove()
    sys.path.remove(folder)
    return {**found, "removed": "forward" not in attention.core_attention.__dict__}


def test_a_users_wrapper_from_the_users_own_module_is_applied_as_printed(worlds: Any, tmp_path: Path) -> None:
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "cp.py").write_text(USERS_WRAPPER)
    for found in worlds(2).run(users_wrapper, str(tmp_path)):
        assert found == {
            "names": ["layers.0.self_attn.core_attention", "layers.1.self_attn.core_attention"],
            "replaced": True,
            "computes": 2.0,
            "removed": True,
        }


# --- 3.2, 3.4: the Python API -------------------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).double()


def planned_and_applied() -> dict[str, Any]:
    model, mesh = llama(), device_mesh()
    tokens = torch.arange(11).view(1, 11)
    expected = model(input_ids=tokens, use_cache=False).logits
    plan = ShardingPlanner(
        plan_overrides={
            "model.layers.*.self_attn": ModuleShardingSpec(
                inner_target="self",
                inner_wrapper="sdpa_hf",
                region_dispatch=False,
            ),
        }
    ).plan(
        model,
        mesh,
        tp_size=1,
        cp_size=2,
        ep_size=1,
        sequence_parallel=False,
        loss_parallel=False,
    )
    wrapped, tp_grad_info = apply_sharding_plan(
        model,
        plan,
        mesh,
    )
    local = shard_batch_for_cp({"input_ids": tokens}, mesh["cp"])
    logits = unshard_sequence(wrapped(**local).logits, 1, mesh["cp"], local["cp_layout"])
    return {
        "module_specs": {name: spec.inner_wrapper for name, spec in plan.module_specs.items()},
        "same model": wrapped is model,
        "no tensor parallelism": tp_grad_info == {},
        "close": bool((logits - expected).norm() <= 1e-12 * expected.norm()),
    }


def test_the_planner_runs_as_printed(worlds: Any) -> None:
    for found in worlds(2).run(planned_and_applied):
        assert found == {
            "module_specs": {"model.layers.0.self_attn": "sdpa_hf", "model.layers.1.self_attn": "sdpa_hf"},
            "same model": True,
            "no tensor parallelism": True,
            "close": True,
        }


def prepare_deepseek_v3_cp_batch(batch: Any) -> Any:
    return {**batch, "labels": batch["input_ids"]}


def prepare_nothing(batch: Any) -> Any:
    return None


def registered() -> dict[str, Any]:
    register_cp_model_spec(
        architecture="deepseek_v3",
        attention_targets=("*.self_attn",),
        batch_prepare_fn=prepare_deepseek_v3_cp_batch,
        wrappers=("deepseek_v3_mla_all_gather", "deepseek_v3_mla_ulysses"),
    )
    from my_project.cp import my_cp_attention_wrapper

    register_inner_wrapper("my_cp_wrapper", my_cp_attention_wrapper)
    spec = ModuleShardingSpec(
        inner_target="self",
        inner_wrapper="my_cp_wrapper",
        region_dispatch=False,
    )
    planner = ShardingPlanner(
        plan_overrides={"model.layers.0.self_attn": spec, "model.layers.1.self_attn": spec},
    )
    model, mesh = llama(), device_mesh()
    model.config.model_type = "deepseek_v3"
    applied = ShardingApplier(planner.plan(model, mesh, cp_size=2), mesh).apply(model)
    batch = applied.shard_batch({"input_ids": torch.arange(7).view(1, 7)})
    other = llama()
    plan = planner.plan(other, mesh, cp_size=2)
    with pytest.raises(ValueError, match=r"the plan of model\.layers\.0\.self_attn was made for another model"):
        ShardingApplier(plan, mesh).apply(llama())
    plain = ShardingApplier(plan, mesh).apply(other)
    register_cp_model_spec(architecture="broken", attention_targets=("*.self_attn",), batch_prepare_fn=prepare_nothing)
    broken = llama()
    broken.config.model_type = "broken"
    with pytest.raises(ValueError, match="batch_prepare_fn prepare_nothing must return the completed batch"):
        ShardingApplier(planner.plan(broken, mesh, cp_size=2), mesh).apply(broken).shard_batch({})
    return {
        "wrappers": [row.wrapper for row in applied.report],
        "prepared": batch["shift_labels"].tolist(),
        "another family is not": "shift_labels" in plain.shard_batch({"input_ids": torch.arange(7).view(1, 7)}),
    }


def test_a_spec_prepares_batches_and_names_wrappers_and_chooses_none(worlds: Any, tmp_path: Path) -> None:
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "cp.py").write_text(USERS_WRAPPER)
    first, second = worlds(2).run(in_folder, str(tmp_path))
    assert first["wrappers"] == second["wrappers"] == ["my_cp_wrapper", "my_cp_wrapper"]
    assert (first["prepared"], second["prepared"]) == ([[1, 2, 3, 4]], [[5, 6, -100, -100]])
    assert not first["another family is not"]


def in_folder(folder: str) -> dict[str, Any]:
    for name in ("my_project", "my_project.cp"):
        sys.modules.pop(name, None)
    sys.path.insert(0, folder)
    try:
        return registered()
    finally:
        sys.path.remove(folder)
