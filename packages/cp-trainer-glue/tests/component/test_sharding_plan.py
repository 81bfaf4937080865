"""The Python API: plan a model, apply the plan; every fault is reported before anything changes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from cp_collectives.testing import RankFailed
from cp_trainer_glue import (
    ModuleShardingSpec,
    PlanOverrideResolver,
    ShardingApplier,
    ShardingPlanner,
    apply_sharding_plan,
)
from cp_trainer_glue._planner import plan_error
from cp_trainer_glue._structure import check_structure
from cp_wrappers import inner_wrapper

GOOD = ModuleShardingSpec(inner_target="self", inner_wrapper="sdpa_hf", region_dispatch=False)


def device_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "cp"))


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).double()


def plan_with(specs: dict[str, ModuleShardingSpec], **sizes: Any) -> None:
    ShardingPlanner(plan_overrides=specs).plan(model(), device_mesh(), **{"cp_size": 2, **sizes})


BOTH = ModuleShardingSpec(inner_wrapper="sdpa_hf", local_compute_fn="mine.fn", region_dispatch=False)


@pytest.mark.parametrize(
    ("specs", "sizes", "sentence"),
    [
        ({"*.self_attn": BOTH}, {}, r"declares both inner_wrapper and local_compute_fn"),
        (
            {"*.self_attn": ModuleShardingSpec(inner_wrapper="sdpa_hf")},
            {},
            r"needs region_dispatch: false, but lacks it",
        ),
        (
            {"*.self_attn": ModuleShardingSpec(inner_target="self")},
            {},
            r"plan_overrides \('\*\.self_attn'\) names no method",
        ),
        ({}, {}, r"2 of 2 attentions have no context-parallel method"),
        ({"*.self_attn": GOOD, "*.1.self_attn": GOOD}, {}, r"model\.layers\.1\.self_attn is declared 2 times"),
        ({"*.self_attn": GOOD}, {"ep_size": 2}, r"ep_size 2: not supported in this version"),
        ({"*.self_attn": GOOD}, {"tp_size": 2}, r"tp_size is 2, but the device mesh has no axis 'tp'"),
        ({"*.self_attn": GOOD}, {"loss_parallel": True}, r"loss_parallel: shards over tensor-parallel ranks, but tp_s"),
        ({"*.self_attn": GOOD}, {"cp_size": 4}, r"cp_size is 4, but axis 'cp' of the device mesh has 2 ranks"),
    ],
    ids=[
        "both-channels",
        "no-region-dispatch",
        "no-method",
        "nothing-declared",
        "twice",
        "ep",
        "tp",
        "no-tp",
        "wrong-size",
    ],
)
def test_a_wrong_plan_is_refused(
    worlds: Any, specs: dict[str, ModuleShardingSpec], sizes: dict[str, int], sentence: str
) -> None:
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(plan_with, specs, **sizes)


@inner_wrapper
def doubling(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    original = target_module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, weights = original(*args, **kwargs)
        return output * 2, weights

    return forward


OWN = ModuleShardingSpec(inner_target="self", inner_wrapper=doubling, region_dispatch=False)


def test_cp_size_1_plans_no_method_of_ours() -> None:
    llama = model()
    plan = ShardingPlanner(plan_overrides={"*.self_attn": GOOD}).plan(llama, None, cp_size=1)
    assert plan.boundaries == ()
    apply_sharding_plan(llama, plan, None)
    assert not any("forward" in module.__dict__ for module in llama.modules())


def test_at_cp_size_1_a_method_of_the_users_own_is_applied_where_it_is_declared() -> None:
    llama = model()
    tokens = torch.arange(11).view(1, 11)
    expected = llama(input_ids=tokens, use_cache=False).logits
    plan = ShardingPlanner(plan_overrides={"model.layers.0.self_attn": OWN}).plan(llama, None, cp_size=1)
    assert list(plan.module_specs) == ["model.layers.0.self_attn"]
    applied = ShardingApplier(plan, None).apply(llama)
    assert not torch.equal(llama(input_ids=tokens, use_cache=False).logits, expected)
    assert llama.config._attn_implementation == "sdpa"
    applied.remove()
    assert torch.equal(llama(input_ids=tokens, use_cache=False).logits, expected)


def test_a_dead_pattern_is_a_fault_at_cp_size_1_too() -> None:
    with pytest.raises(ValueError, match=r"plan_overrides \('\*\.attention'\) matches no module"):
        ShardingPlanner(plan_overrides={"*.attention": OWN}).plan(model(), None, cp_size=1)


def test_cp_needs_a_mesh() -> None:
    with pytest.raises(ValueError, match="cp_size is 2, but the device mesh has no axis 'cp'"):
        ShardingPlanner(plan_overrides={"*.self_attn": GOOD}).plan(model(), None, cp_size=2)


CORRECTABLE = {
    "no-region-dispatch": {"*.self_attn": ModuleShardingSpec(inner_wrapper="sdpa_hf")},
    "nothing-declared": {},
    "own-wrapper-without-target": {"*.1": OWN, "*.0.self_attn": OWN, "dead": OWN},
}


@pytest.mark.parametrize("specs", CORRECTABLE.values(), ids=CORRECTABLE.keys())
def test_the_entries_of_the_message_work_when_pasted(specs: dict[str, ModuleShardingSpec]) -> None:
    check = ShardingPlanner(plan_overrides=specs).check(model(), cp_size=2)
    assert check.faults
    message = str(plan_error(check))
    pasted = yaml.safe_load(message[message.index("plan_overrides:\n") :])
    sections = check_structure({"plan_overrides": pasted["plan_overrides"]}).sections
    overrides = PlanOverrideResolver(sections["plan_overrides"]).resolve(cp_size=2)
    assert ShardingPlanner(overrides).check(model(), cp_size=2).faults == ()


def plan_that_one_rank_gets_wrong() -> str:
    mesh, llama = device_mesh(), model()
    wrong = dist.get_rank() == 1
    planner = ShardingPlanner(plan_overrides={"*.attention" if wrong else "*.self_attn": GOOD})
    with pytest.raises(ValueError) as caught:
        apply_sharding_plan(llama, planner.plan(llama, mesh, cp_size=2), mesh)
    assert not any("forward" in module.__dict__ for module in llama.modules())
    return str(caught.value)


def test_a_plan_that_one_rank_gets_wrong_stops_all(worlds: Any) -> None:
    first, second = worlds(2).run(plan_that_one_rank_gets_wrong, time_limit=30)
    assert first == second
    assert first.startswith("rank 1: plan_overrides ('*.attention') matches no module")


@pytest.mark.parametrize("cp_size", [0, -1, "2", True, 2.0])
def test_a_cp_size_that_is_none_is_refused(cp_size: Any) -> None:
    with pytest.raises(ValueError, match="cp_size must be a whole number of at least 1"):
        ShardingPlanner(plan_overrides={"*.self_attn": GOOD}).plan(model(), None, cp_size=cp_size)


def test_a_spec_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"but '\*\.self_attn' has a str"):
        ShardingPlanner(plan_overrides={"*.self_attn": "sdpa_hf"})
    with pytest.raises(ValueError, match="take the plan_overrides of a TrainerConfig"):
        PlanOverrideResolver([{"match": "*.self_attn"}])
