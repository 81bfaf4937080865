"""Whatever fails on one rank alone while a model is set up stops all ranks with that rank's message."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from cp_core import AllGatherStrategy
from cp_wrappers import MethodDeclaration, apply_context_parallel, inner_wrapper, register_cp_model_spec


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


class FailingShape(AllGatherStrategy):
    def validate_shape(self, cp_size: int, shape: Any) -> None:
        if dist.get_rank() == 1:
            raise KeyError("no such card")


class FailingMesh(AllGatherStrategy):
    def validate(self, mesh: Any, shape: Any) -> None:
        if dist.get_rank() == 1:
            raise KeyError("no such card")


@inner_wrapper(strategy=FailingShape)
def failing_shape(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any: ...


@inner_wrapper(strategy=FailingMesh)
def failing_mesh(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return lambda *args, **kwargs: None


@inner_wrapper
def exiting(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    if dist.get_rank() == 1:
        raise SystemExit(3)
    return lambda *args, **kwargs: None


@inner_wrapper
def fine(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return lambda *args, **kwargs: None


def declared(kind: str) -> Any:
    wrappers = {"shape": failing_shape, "mesh": failing_mesh, "exit": exiting}
    if kind in wrappers:
        return {"*.self_attn": wrappers[kind]}
    if dist.get_rank() == 0:
        return {"*.self_attn": fine}
    return {
        "builtin": [MethodDeclaration(match="*.self_attn", local_compute_fn=dict)],
        "no declarations": 3,
        "no pattern": {3: "sdpa_hf", "*.nowhere": "sdpahf"},
    }[kind]


def applied(kind: str) -> str:
    model = llama()
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)) as caught:
        apply_context_parallel(model, cp_mesh(), declared(kind))
    assert model.config._attn_implementation == "sdpa"
    assert not any({"forward", "_context_parallel"} & vars(module).keys() for module in model.modules())
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "sentences"),
    [
        ("shape", ["model.layers.0.self_attn: checking 'failing_shape' failed: KeyError: 'no such card'"]),
        ("mesh", ["context parallelism could not be set up: KeyError: 'no such card'"]),
        ("exit", ["model.layers.0.self_attn: inner_wrapper 'exiting' failed: SystemExit: 3"]),
        ("builtin", ["the declaration '*.self_attn': dict has no parameters that can be read"]),
        (
            "no declarations",
            ["declarations must be {pattern: wrapper} or a sequence of MethodDeclaration, but got int."],
        ),
        (
            "no pattern",
            [
                "match must be a pattern such as '*.self_attn', but is 3.",
                "the declaration '*.nowhere' matches no module",
                "no inner_wrapper is called 'sdpahf'",
            ],
        ),
    ],
)
def test_a_fault_of_one_rank_stops_all(worlds: Any, kind: str, sentences: list[str]) -> None:
    first, second = worlds(2).run(applied, kind, time_limit=30)
    assert first == second
    assert first.startswith("rank 1: ")
    for sentence in sentences:
        assert sentence in first


def failing_preparation(batch: Any) -> Any:
    if dist.get_rank() == 1:
        raise KeyError("images")
    return batch


def sharded() -> str:
    register_cp_model_spec(
        architecture="fails_on_one_rank", attention_targets=("*.self_attn",), batch_prepare_fn=failing_preparation
    )
    model = llama()
    model.config.model_type = "fails_on_one_rank"
    handle = apply_context_parallel(model, cp_mesh(), {"*.self_attn": "sdpa_hf"})
    with pytest.raises(ValueError) as caught:
        handle.shard_batch({"input_ids": torch.arange(8).view(1, 8)})
    return str(caught.value)


def test_a_batch_that_one_rank_cannot_prepare_stops_all(worlds: Any) -> None:
    first, second = worlds(2).run(sharded, time_limit=30)
    assert first == second
    assert first.startswith("rank 1: preparing the batch failed: KeyError: 'images' (")
