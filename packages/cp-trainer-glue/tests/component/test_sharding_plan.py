"""The Python API: plan a model, apply the plan; every fault is reported before anything changes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from cp_collectives.testing import RankFailed
from cp_core import shard_batch_for_cp, unshard_sequence
from cp_trainer_glue import ModuleShardingSpec, ShardingPlanner, apply_sharding_plan

GOOD = ModuleShardingSpec(inner_target="self", inner_wrapper="sdpa_hf", region_dispatch=False)


def device_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "cp"))


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).double()


def planned_and_applied() -> dict[str, Any]:
    mesh, llama = device_mesh(), model()
    tokens = torch.arange(11).view(1, 11)
    expected = llama(input_ids=tokens, use_cache=False).logits
    plan = ShardingPlanner(plan_overrides={"model.layers.*.self_attn": GOOD}).plan(
        llama, mesh, tp_size=1, cp_size=2, ep_size=1, sequence_parallel=False, loss_parallel=False
    )
    wrapped, tp_grad_info = apply_sharding_plan(llama, plan, mesh)
    local = shard_batch_for_cp({"input_ids": tokens}, mesh["cp"])
    logits = unshard_sequence(wrapped(**local).logits, 1, mesh["cp"], local["cp_layout"])
    return {
        "boundaries": [boundary.fqn for boundary in plan.boundaries],
        "same model": wrapped is llama,
        "no tensor parallelism": tp_grad_info == {},
        "close": bool((logits - expected).norm() <= 1e-12 * expected.norm()),
    }


def test_the_api_of_the_design_document_runs_as_printed(worlds: Any) -> None:
    for found in worlds(2).run(planned_and_applied):
        assert found == {
            "boundaries": ["model.layers.0.self_attn", "model.layers.1.self_attn"],
            "same model": True,
            "no tensor parallelism": True,
            "close": True,
        }


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
            r"needs region_dispatch: false, but has None",
        ),
        ({"*.self_attn": ModuleShardingSpec(inner_target="self")}, {}, r"'\*\.self_attn' names no method"),
        ({}, {}, r"2 of 2 attentions have no context-parallel method"),
        ({"*.self_attn": GOOD, "*.1.self_attn": GOOD}, {}, r"model\.layers\.1\.self_attn is declared 2 times"),
        ({"*.self_attn": GOOD}, {"tp_size": 2}, r"tp_size 2: not supported in this version"),
        ({"*.self_attn": GOOD}, {"cp_size": 4}, r"cp_size is 4, but axis 'cp' of the device mesh has 2 ranks"),
    ],
    ids=["both-channels", "no-region-dispatch", "no-method", "nothing-declared", "twice", "tp", "wrong-size"],
)
def test_a_wrong_plan_is_refused(
    worlds: Any, specs: dict[str, ModuleShardingSpec], sizes: dict[str, int], sentence: str
) -> None:
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(plan_with, specs, **sizes)


def test_cp_size_1_plans_nothing() -> None:
    plan = ShardingPlanner(plan_overrides={"*.self_attn": GOOD}).plan(model(), None, cp_size=1)
    assert plan.boundaries == ()
