"""Applying, watching and removing wrappers on real models of transformers."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from cp_collectives import CollectiveTrace
from cp_collectives.testing import RankFailed
from cp_core import shard_batch_for_cp, unshard_sequence
from cp_wrappers import MethodDeclaration, apply_context_parallel, inner_wrapper

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).double()


def tokens() -> torch.Tensor:
    return torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(3))


def logits_of(model: torch.nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    local = shard_batch_for_cp({"input_ids": tokens()}, mesh)
    return unshard_sequence(model(**local).logits.detach(), 1, mesh, local["cp_layout"])


def plain_logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=tokens(), use_cache=False).logits.detach()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-12 * expected.norm())


# --- applying and removing ----------------------------------------------------------------------------------------


def apply_and_remove() -> dict[str, Any]:
    mesh, model = cp_mesh(), llama()
    expected, state = plain_logits(model), set(model.state_dict())
    applied = apply_context_parallel(model, mesh, {"*.0.self_attn": "sdpa_hf", "*.1.self_attn": "sdpa_hf"})
    found = {
        "report": [(row.fqn, row.wrapper, row.match) for row in applied.report],
        "strategies": len(applied.strategies),
        "wrapped": close(logits_of(model, mesh), expected),
        "same state dict": set(model.state_dict()) == state,
        "cache off": model.config.use_cache is False,
    }
    applied.remove()
    found["removed"] = torch.equal(plain_logits(model), expected)
    found["implementation"] = model.config._attn_implementation
    found["cache back"] = model.config.use_cache
    again = apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    found["wrapped again"] = close(logits_of(model, mesh), expected)
    again.remove()
    return found


def test_a_model_is_wrapped_and_given_back(worlds: Any) -> None:
    for found in worlds(2).run(apply_and_remove):
        assert found == {
            "report": [
                ("model.layers.0.self_attn", "sdpa_hf", "*.0.self_attn"),
                ("model.layers.1.self_attn", "sdpa_hf", "*.1.self_attn"),
            ],
            "strategies": 1,
            "wrapped": True,
            "same state dict": True,
            "cache off": True,
            "removed": True,
            "implementation": "sdpa",
            "cache back": True,
            "wrapped again": True,
        }


def wrap_twice() -> None:
    mesh, model = cp_mesh(), llama()
    apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})


def test_wrapping_twice_is_refused(worlds: Any) -> None:
    with pytest.raises(RankFailed, match=r"model\.layers\.0\.self_attn is wrapped already"):
        worlds(2).run(wrap_twice)


def fault_on_one_rank() -> str:
    mesh, model = cp_mesh(), llama()
    pattern = "*.self_attn" if mesh.get_local_rank() == 0 else "*.attention"
    try:
        apply_context_parallel(model, mesh, {pattern: "sdpa_hf"})
    except ValueError as error:
        untouched = model.config._attn_implementation == "sdpa" and plain_logits(model) is not None
        return str(error) if untouched else "the model was changed"
    return "no error"


def test_a_fault_on_one_rank_stops_all_with_its_message(worlds: Any) -> None:
    first, second = worlds(2).run(fault_on_one_rank)
    assert first == second
    assert first.startswith("rank 1: the pattern '*.attention' (inner_target left out) reaches no attention")


# --- two models, copies -------------------------------------------------------------------------------------------


def two_models() -> dict[str, bool]:
    mesh = cp_mesh()
    one, other, plain = llama(1), llama(2), llama(3)
    expected = [plain_logits(model) for model in (one, other, plain)]
    apply_context_parallel(one, mesh, {"*.self_attn": "sdpa_hf"})
    apply_context_parallel(other, mesh, {"*.self_attn": "sdpa_hf"})
    copied = copy.deepcopy(one)
    with torch.no_grad():
        copied.model.layers[0].self_attn.o_proj.weight.zero_()
    return {
        "first": close(logits_of(one, mesh), expected[0]),
        "second": close(logits_of(other, mesh), expected[1]),
        "unwrapped": torch.equal(plain_logits(plain), expected[2]),
        "the copy runs its own modules": not close(logits_of(copied, mesh), expected[0]),
    }


def test_models_and_copies_do_not_disturb_each_other(worlds: Any) -> None:
    for found in worlds(2).run(two_models):
        assert all(found.values()), found


@inner_wrapper
def returning_wrapper(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    original = target_module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return forward


@inner_wrapper
def in_place_wrapper(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, scale: float) -> None:
    original = target_module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, weights = original(*args, **kwargs)
        return output * scale, weights

    target_module.forward = forward


@inner_wrapper
def idle_wrapper(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> None:
    return None


SCALED_BY_ONE = {"_target_": f"{__name__}.in_place_wrapper", "scale": 1.0}


def users_wrappers() -> dict[str, Any]:
    mesh, model = cp_mesh(), llama()
    expected = plain_logits(model)
    applied = apply_context_parallel(model, mesh, {"*.self_attn": returning_wrapper})
    same = torch.equal(plain_logits(model), expected)
    with pytest.raises(NotImplementedError, match="cannot be copied"):
        copy.deepcopy(model)
    applied.remove()
    applied = apply_context_parallel(
        model, mesh, [MethodDeclaration(match="*.self_attn", inner_wrapper=SCALED_BY_ONE, inner_target="self")]
    )
    in_place = torch.equal(plain_logits(model), expected)
    applied.remove()
    return {"returning": same, "in place": in_place, "removed": torch.equal(plain_logits(model), expected)}


def test_a_users_wrapper_computes_with_the_models_earlier_attention(worlds: Any) -> None:
    for found in worlds(2).run(users_wrappers):
        assert all(found.values()), found


def wrap_idly() -> None:
    apply_context_parallel(llama(), cp_mesh(), {"*.self_attn": idle_wrapper})


def test_a_wrapper_that_does_nothing_is_an_error(worlds: Any) -> None:
    with pytest.raises(RankFailed, match="returned None and left forward as it was"):
        worlds(2).run(wrap_idly)


# --- what a forward must look like --------------------------------------------------------------------------------


def forward_fault(kind: str) -> None:
    mesh, model = cp_mesh(), llama()
    apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    local = shard_batch_for_cp({"input_ids": tokens()}, mesh)
    if kind == "no layout":
        local.pop("cp_layout")
    if kind == "mask":
        local["attention_mask"] = torch.ones(2, 7, dtype=torch.long)
    if kind == "cache":
        local["use_cache"] = True
    if kind == "unwrapped":
        del model.model.layers[1].self_attn.__dict__["_context_parallel"]
    if kind == "no attention call":
        model.model.layers[1].self_attn.forward._original = lambda hidden_states, **_: (hidden_states, None)
    if kind == "packed keyword":
        local["cu_seq_lens_q"] = torch.tensor([0, 7])
    if kind == "packed positions":
        local["position_ids"] = local["position_ids"] % 3
    if kind == "wrong length":
        local["input_ids"] = local["input_ids"][:, :3]
        local["position_ids"] = local["position_ids"][:, :3]
    model(**local)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("no layout", r"model\.layers\.0\.self_attn got no sequence layout"),
        ("mask", r"the model was given an attention_mask \(2, 7\) directly"),
        ("cache", r"model\.layers\.0\.self_attn was given a key/value cache"),
        ("unwrapped", r"a LlamaAttention \(layer_idx 1\) attends without a declared"),
        ("no attention call", r"model\.layers\.1\.self_attn: one forward must reach .* it did 0 times"),
        ("packed keyword", r"attention was asked for cu_seq_lens_q"),
        ("packed positions", r"the model asks for a mask that is not plainly causal"),
        ("wrong length", r"must be \[B, N, L, D\] with L = 7"),
    ],
)
def test_a_wrong_forward_is_refused_by_name(worlds: Any, kind: str, sentence: str) -> None:
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(forward_fault, kind)


def refused_model(kind: str) -> None:
    if kind == "sliding window":
        torch.manual_seed(0)
        model: torch.nn.Module = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))
    elif kind == "dropout":
        model = llama(attention_dropout=0.5)
    elif kind == "chunked layers":
        fields = {**SIZES, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32}
        model = Llama4ForCausalLM(Llama4TextConfig(**fields))
    elif kind == "linear attention":
        fields = {**SIZES, "num_hidden_layers": 4, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1}
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**fields, moe_intermediate_size=8))
    elif kind == "convolution":
        model = llama()
        model.model.layers[1].mlp.mix = torch.nn.Conv1d(32, 32, 4)
    else:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        model = llama(rope_parameters=rope, max_position_embeddings=16)
    apply_context_parallel(model, cp_mesh(), {"*.self_attn": "sdpa_hf"})


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("sliding window", r"model\.layers\.0\.self_attn: sliding_window=4 is not supported"),
        ("dropout", r"model\.layers\.0\.self_attn: attention_dropout=0\.5 is not supported"),
        ("rotary", r"rope_type='dynamic', which depends on the longest position"),
        ("chunked layers", r"model\.layers\.0\.self_attn: layer type 'chunked_attention'"),
        (
            "linear attention",
            r"model\.layers\.0\.linear_attn \(Qwen3NextGatedDeltaNet\) mixes tokens along the sequence",
        ),
        ("convolution", r"model\.layers\.1\.mlp\.mix \(Conv1d\) mixes tokens along the sequence"),
    ],
)
def test_an_attention_that_no_method_honours_is_refused_at_apply(worlds: Any, kind: str, sentence: str) -> None:
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(refused_model, kind)


def scaled_scores() -> bool:
    torch.manual_seed(0)
    mesh, model = cp_mesh(), GraniteForCausalLM(GraniteConfig(**SIZES, attention_multiplier=0.9)).double()
    expected = plain_logits(model)
    apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    return close(logits_of(model, mesh), expected)


def test_a_models_own_scale_of_the_scores_is_honoured(worlds: Any) -> None:
    assert worlds(2).run(scaled_scores) == [True, True]


# --- layouts that are set -----------------------------------------------------------------------------------------


def set_layout() -> dict[str, Any]:
    mesh, model = cp_mesh(), llama()
    expected = plain_logits(model)
    applied = apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    local = shard_batch_for_cp({"input_ids": tokens()}, mesh)
    layout = local.pop("cp_layout")
    applied.set_layout(layout)
    logits = model(**local).logits
    found: dict[str, Any] = {"right": close(unshard_sequence(logits.detach(), 1, mesh, layout), expected)}
    other = shard_batch_for_cp({"input_ids": tokens()[:, :9]}, mesh)["cp_layout"]
    applied.set_layout(layout)  # an equal one is fine
    with pytest.raises(RuntimeError, match="awaits its backward"):
        applied.set_layout(other)
    logits.sum().backward()
    applied.set_layout(other)
    forgotten = model(input_ids=local["input_ids"][:, :5], position_ids=local["position_ids"][:, :5]).logits
    del forgotten
    applied.set_layout(layout)
    return found


def test_a_layout_is_set_only_while_no_other_forward_awaits_its_backward(worlds: Any) -> None:
    for found in worlds(2).run(set_layout):
        assert all(found.values()), found


def traced_layers() -> list[str | None]:
    mesh, model = cp_mesh(), llama()
    apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    with CollectiveTrace() as trace:
        logits_of(model, mesh)
    return [record.layer for record in trace.records]


def test_each_layer_communicates(worlds: Any) -> None:
    for layers in worlds(2).run(traced_layers):
        assert layers[:2] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def cache_switched_off() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("cp_wrappers")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    apply_context_parallel(llama(), cp_mesh(), {"*.self_attn": "sdpa_hf"})
    logger.removeHandler(handler)
    return messages


def test_switching_the_cache_off_is_said(worlds: Any) -> None:
    for messages in worlds(2).run(cache_switched_off):
        assert messages == ["config.use_cache was True and is now False: key/value caches are for inference."]
