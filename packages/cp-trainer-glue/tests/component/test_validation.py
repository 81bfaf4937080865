"""Under `sharding_mode: validate` a wrong declared placement is named, and so is a tensor that is not what it was.

That outputs and gradients are those of production is in tests/trainer/test_gradient_domains.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from transformers import AutoModelForCausalLM, LlamaConfig

from cp_core import InvalidInputError
from cp_trainer_glue import ModuleShardingSpec, ShardingApplier, ShardingPlanner
from cp_trainer_glue._placements import View, parse_placements, placement_fault
from cp_trainer_glue._validation import Validation
from cp_wrappers import inner_wrapper

S = 16
AXES = ("dp_replicate", "cp", "tp")


def view(place: tuple[int, int, int], shape: tuple[int, ...], digest: str, length: int | None = None) -> View:
    return View(coordinates=place, shape=shape, digest=digest, local_length=length)


def on_cp(*views: tuple[tuple[int, ...], str]) -> list[View]:
    return [view((0, rank, 0), shape, digest, 8) for rank, (shape, digest) in enumerate(views)]


SHARD, WHOLE = (2, 8, 4), (2, 16, 4)
FAULTS: dict[str, tuple[list[View], Any, list[str] | None, str | None]] = {
    "shards": (on_cp((SHARD, "a"), (SHARD, "b")), Shard(1), None, None),
    "copies": (on_cp((SHARD, "a"), (SHARD, "a")), Replicate(), None, None),
    "other values": (
        on_cp((SHARD, "a"), (SHARD, "b")),
        Replicate(),
        None,
        "is declared replicate over cp, but rank 1 has other values than rank 0",
    ),
    "another dim": (
        on_cp((SHARD, "a"), (SHARD, "b")),
        Shard(2),
        None,
        "is declared shard(2) over cp, but a shard has 8 of 16 tokens, and this is [2, 8, 4]; dim 1 has them",
    ),
    "gathered": (
        on_cp((WHOLE, "a"), (WHOLE, "a")),
        Shard(1),
        None,
        "is declared shard(1) over cp, but a shard has 8 of 16 tokens, and this is [2, 16, 4]",
    ),
    "uneven": (
        on_cp((SHARD, "a"), ((2, 7, 4), "b")),
        Shard(1),
        None,
        "is [2, 8, 4] on rank 0 and [2, 7, 4] on rank 1",
    ),
    "one result of different inputs": (
        on_cp((SHARD, "a"), (SHARD, "a")),
        Shard(1),
        ["x", "y"],
        "all its ranks [0, 1] have the same values, made of different inputs",
    ),
    "one result of one input": (on_cp((SHARD, "a"), (SHARD, "a")), Shard(1), ["x", "x"], None),
    "no such dim": (on_cp(((2, 8), "a"), ((2, 8), "b")), Shard(2), None, "has 2 dims, [2, 8]"),
}


@pytest.mark.parametrize(("views", "placement", "inputs", "sentence"), FAULTS.values(), ids=FAULTS.keys())
def test_what_contradicts_a_placement_is_said(
    views: list[View], placement: Any, inputs: list[str] | None, sentence: str | None
) -> None:
    fault = placement_fault(views, {"cp": placement}, axes=AXES, inputs=inputs)
    assert (fault is None) if sentence is None else (fault is not None and sentence in fault)


def test_only_ranks_of_one_line_are_compared() -> None:
    places = {(0, 0, 0): "a", (0, 0, 1): "a", (1, 0, 0): "b", (1, 0, 1): "c"}
    views = [view(place, (1,), digest) for place, digest in places.items()]
    fault = placement_fault(views, {"tp": Replicate()}, axes=AXES)
    assert fault is not None
    assert "rank 3 has other values than rank 2" in fault


@pytest.mark.parametrize("declared", [{"cp": "sharded"}, {"sequence": "replicate"}, {"cp": "shard(-1)"}])
def test_a_placement_is_one_of_two_words(declared: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match="a placement is `replicate` or"):
        parse_placements(declared, where="here")


@inner_wrapper
def gathers_its_output(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Callable[..., Any]:
    original = target_module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, *rest = original(*args, **kwargs)
        return output.repeat(1, cp_mesh.size(), 1), *rest

    return forward


@inner_wrapper
def first_rank_for_all(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Callable[..., Any]:
    original = target_module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, *rest = original(*args, **kwargs)
        shared = output.detach().clone()
        dist.broadcast(shared, src=0, group=cp_mesh.get_group())
        return shared, *rest

    return forward


def spec(wrapper: Any, **placements: dict[str, str]) -> ModuleShardingSpec:
    return ModuleShardingSpec(inner_target="self", inner_wrapper=wrapper, region_dispatch=False, **placements)


CASES: dict[str, tuple[ModuleShardingSpec, str]] = {
    "right": (spec("sdpa_hf"), "no error"),
    "right and declared": (spec("sdpa_hf", output_placements={"cp": "shard(1)"}), "no error"),
    "output in another dim": (
        spec("sdpa_hf", output_placements={"cp": "shard(2)"}),
        "model.layers.0.self_attn: its output is declared shard(2) over cp, but a shard has 8 of 16 tokens, and this "
        "is [1, 8, 32]; dim 1 has them; mend the wrapper, or declare what it does in output_placements.",
    ),
    "input replicated": (
        spec("sdpa_hf", input_placements={"cp": "replicate"}),
        "model.layers.0.self_attn: its input is declared replicate over cp, but rank 1 has other values than rank 0",
    ),
    "gathered output": (
        spec(gathers_its_output, output_placements={"cp": "shard(1)"}),
        "its output is declared shard(1) over cp, but a shard has 8 of 16 tokens, and this is [1, 16, 32]",
    ),
    "the first rank's output": (
        spec(first_rank_for_all, output_placements={"cp": "shard(1)"}),
        "its output is declared shard(1) over cp, but all its ranks [0, 1] have the same values, made of different",
    ),
}


def message_of(case: str) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_key_value_heads=1, **sizes, use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
    plan = ShardingPlanner({"*.self_attn": CASES[case][0]}).plan(model, mesh, cp_size=2)
    applied = ShardingApplier(plan, mesh, sharding_mode="validate").apply(model)
    ids = torch.arange(S).view(1, S)
    batch = applied.shard_batch({"input_ids": ids, "labels": ids})
    batch.pop("shift_labels")
    try:
        model(**batch).logits.sum().backward()
    except InvalidInputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_declared_placement_is_named(worlds: Any, case: str) -> None:
    for message in worlds(2).run(message_of, case):
        assert CASES[case][1] in message


def drifted() -> str:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    param = torch.nn.Parameter(torch.full((2,), float(dist.get_rank())))
    with pytest.raises(InvalidInputError) as caught:
        Validation(device_mesh=mesh).check_parameters([("norm.weight", param)], gradients=False)
    return str(caught.value)


def test_a_parameter_that_drifted_is_named(worlds: Any) -> None:
    for message in worlds(2).run(drifted):
        assert message.startswith("parameter norm.weight is declared replicate over cp, but rank 1 has other values")
