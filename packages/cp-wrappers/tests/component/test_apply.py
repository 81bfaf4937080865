"""Applying, watching and removing wrappers on real models of transformers."""

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from cp_collectives import CollectiveTrace
from cp_collectives.testing import RankFailed
from cp_core import shard_batch_for_cp, unshard_sequence
from cp_wrappers import MethodDeclaration, apply_context_parallel, inner_wrapper
from cp_wrappers.wrappers import sdpa_hf_cp_wrapper

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


def wrap_twice() -> dict[str, Any]:
    mesh, model = cp_mesh(), llama()
    expected = plain_logits(model)
    applied = apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    with pytest.raises(ValueError) as caught:
        apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    still = close(logits_of(model, mesh), expected)
    applied.remove()
    applied.remove()  # once more does nothing
    return {"said": str(caught.value), "still": still, "removed": torch.equal(plain_logits(model), expected)}


def test_wrapping_twice_is_refused_and_leaves_the_first_as_it_is(worlds: Any) -> None:
    for found in worlds(2).run(wrap_twice):
        assert found["said"] == (
            "model.layers.0.self_attn is wrapped already; call remove() on the earlier handle first. The same holds "
            "for model.layers.1.self_attn."
        )
        assert found["still"] and found["removed"]


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
    assert first.startswith("rank 1: the declaration '*.attention' matches no module; the model's attentions are")
    assert first.endswith("Declarations that fit this model:\n{\n    '*.self_attn': 'sdpa_hf',\n}")


def different_methods() -> str:
    mesh, model = cp_mesh(), llama()
    wrapper: Any = "sdpa_hf" if mesh.get_local_rank() == 0 else SCALED_BY_ONE
    with pytest.raises(ValueError) as caught:
        apply_context_parallel(model, mesh, {"*.self_attn": wrapper})
    assert untouched(model)
    return str(caught.value)


def test_ranks_with_different_methods_are_refused(worlds: Any) -> None:
    first, second = worlds(2).run(different_methods)
    assert first == second
    assert first.startswith(
        "all ranks must declare the same methods, but for model.layers.0.self_attn rank 0 has sdpa_hf {} and rank 1 "
    )


def untouched(model: Any) -> bool:
    return model.config._attn_implementation == "sdpa" and not any(
        "forward" in module.__dict__ or "_context_parallel" in module.__dict__ for module in model.modules()
    )


@inner_wrapper
def fails_in_the_second_layer_of_rank_1(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    if target_module.layer_idx == 1 and cp_mesh.get_local_rank() == 1:
        raise KeyError("rotary")
    original = target_module.forward
    return lambda *args, **kwargs: original(*args, **kwargs)


def wrapper_fails_on_one_rank() -> str:
    mesh, model = cp_mesh(), llama()
    with pytest.raises(ValueError) as caught:
        apply_context_parallel(model, mesh, {"*.self_attn": fails_in_the_second_layer_of_rank_1})
    assert untouched(model)
    return str(caught.value)


def test_a_wrapper_that_fails_on_one_rank_stops_all_and_leaves_the_model_as_it_was(worlds: Any) -> None:
    first, second = worlds(2).run(wrapper_fails_on_one_rank)
    assert first == second
    assert first.startswith(
        "rank 1: model.layers.1.self_attn: inner_wrapper 'fails_in_the_second_layer_of_rank_1' failed: "
        "KeyError: 'rotary' ("
    )


# --- two models, copies -------------------------------------------------------------------------------------------


def two_models(first_is: str) -> dict[str, bool]:
    mesh = cp_mesh()
    models = {"gathered": llama(1), "scaled": llama(2), "plain": llama(3)}
    expected = {name: plain_logits(model) for name, model in models.items()}
    methods: dict[str, Any] = {"gathered": "sdpa_hf", "scaled": SCALED_BY_ONE}
    applied = {
        name: apply_context_parallel(models[name], mesh, {"*.self_attn": methods[name]})
        for name in sorted(methods, key=lambda name: name != first_is)
    }
    copied = copy.deepcopy(models["gathered"])
    with torch.no_grad():
        copied.model.layers[0].self_attn.o_proj.weight.zero_()
    found = {
        "gathered": close(logits_of(models["gathered"], mesh), expected["gathered"]),
        "scaled": torch.equal(plain_logits(models["scaled"]), expected["scaled"]),
        "plain": torch.equal(plain_logits(models["plain"]), expected["plain"]),
        "the copy runs its own modules": not close(logits_of(copied, mesh), expected["gathered"]),
    }
    applied[first_is].remove()
    other = next(name for name in methods if name != first_is)
    found["removed"] = torch.equal(plain_logits(models[first_is]), expected[first_is])
    logits = logits_of(models[other], mesh) if other == "gathered" else plain_logits(models[other])
    found["the other stays wrapped"] = close(logits, expected[other])
    return found


@pytest.mark.parametrize("first_is", ["gathered", "scaled"])
def test_models_and_copies_do_not_disturb_each_other(worlds: Any, first_is: str) -> None:
    for found in worlds(2).run(two_models, first_is):
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


@inner_wrapper
def wrapper_of_itself(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return target_module


@inner_wrapper
def wrapper_of_the_same(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return target_module.forward


def wrap_idly(wrapper: Any) -> None:
    apply_context_parallel(llama(), cp_mesh(), {"*.self_attn": wrapper})


@pytest.mark.parametrize(
    ("wrapper", "sentence"),
    [
        (idle_wrapper, "returned None and left forward as it was"),
        (wrapper_of_itself, "returned the module itself; return a replacement"),
        (wrapper_of_the_same, "returned target_module.forward as it was; return a replacement"),
    ],
    ids=["nothing", "the module", "its forward"],
)
def test_a_wrapper_that_does_nothing_is_an_error(worlds: Any, wrapper: Any, sentence: str) -> None:
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(wrap_idly, wrapper)


@inner_wrapper
def calls_a_built_in_one(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return sdpa_hf_cp_wrapper(target_module, mesh, tp_mesh, cp_mesh, ep_mesh)


def built_on_ours() -> dict[str, bool]:
    mesh, model = cp_mesh(), llama()
    expected = plain_logits(model)
    applied = apply_context_parallel(model, mesh, {"*.self_attn": calls_a_built_in_one})
    found = {"right": close(logits_of(model, mesh), expected), "strategy": len(applied.strategies) == 1}
    applied.remove()
    dropping = llama(attention_dropout=0.5)
    with pytest.raises(NotImplementedError, match=r"model\.layers\.0\.self_attn: attention_dropout=0\.5"):
        apply_context_parallel(dropping, mesh, {"*.self_attn": calls_a_built_in_one})
    return {**found, "removed": torch.equal(plain_logits(model), expected), "refused": untouched(dropping)}


def test_a_users_wrapper_may_build_on_a_built_in_one(worlds: Any) -> None:
    for found in worlds(2).run(built_on_ours):
        assert all(found.values()), found


def scaled_values(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, scale: float) -> Any:
    def compute(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        values = target_module.v_proj(hidden_states)
        return target_module.o_proj(torch.cat([values, values], dim=-1)) * scale, None

    return compute


def returns_nothing(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> None:
    return None


def local_computes() -> dict[str, bool]:
    mesh, model = cp_mesh(), llama()
    expected = plain_logits(model)
    compute = {"_target_": f"{__name__}.scaled_values", "scale": 0.0}
    declaration = MethodDeclaration(match="*.self_attn", local_compute_fn=compute)
    applied = apply_context_parallel(model, mesh, [declaration])
    local = shard_batch_for_cp({"input_ids": tokens()}, mesh)
    layer = model.model.layers[0]
    hidden = torch.ones(1, 3, 32, dtype=torch.float64)
    found = {
        "in place of the forward": torch.equal(layer.self_attn(hidden)[0], torch.zeros_like(hidden)),
        "with the batch": torch.isfinite(model(**local).logits).all().item(),
        "reported": [row.wrapper.endswith("scaled_values") for row in applied.report] == [True, True],
    }
    applied.remove()
    return {**found, "removed": torch.equal(plain_logits(model), expected)}


def test_a_local_compute_fn_takes_the_attentions_place(worlds: Any) -> None:
    for found in worlds(2).run(local_computes):
        assert all(found.values()), found


def computes_nothing() -> None:
    apply_context_parallel(
        llama(), cp_mesh(), [MethodDeclaration(match="*.self_attn", local_compute_fn=returns_nothing)]
    )


def test_a_local_compute_fn_that_returns_nothing_is_an_error(worlds: Any) -> None:
    with pytest.raises(RankFailed, match="local_compute_fn 'returns_nothing' returned None; return the callable"):
        worlds(2).run(computes_nothing)


@inner_wrapper
def pass_through(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    original = target_module.forward
    return lambda *args, **kwargs: original(*args, **kwargs)


def wrapped_around() -> dict[str, bool]:
    """A wrapper on the block that holds the attention: the attention itself stays plain."""
    mesh, model = cp_mesh(), llama()
    expected = plain_logits(model)
    declarations = [
        MethodDeclaration(match="model.layers.0", inner_target="self", inner_wrapper=pass_through),
        MethodDeclaration(match="model.layers.1.self_attn", inner_wrapper=pass_through),
    ]
    applied = apply_context_parallel(model, mesh, declarations)
    found = {
        "computed by the earlier attention": torch.equal(plain_logits(model), expected),
        "names": [row.fqn for row in applied.report] == ["model.layers.0", "model.layers.1.self_attn"],
    }
    applied.remove()
    return {**found, "removed": untouched(model)}


def test_a_users_wrapper_may_stand_around_the_attention(worlds: Any) -> None:
    for found in worlds(2).run(wrapped_around):
        assert all(found.values()), found


# --- models that something else has wrapped -----------------------------------------------------------------------


def gradients_of(model: torch.nn.Module, mesh: DeviceMesh | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return global logits, and the gradient of each trainable parameter under a loss over all of them."""
    if mesh is None:
        logits = model(input_ids=tokens(), use_cache=False).logits
    else:
        local = shard_batch_for_cp({"input_ids": tokens()}, mesh)
        logits = model(**local).logits[:, local["cp_layout"].global_index < 13]
    logits.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if mesh is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=mesh.get_group())
        with torch.no_grad():
            return logits_of(model, mesh), gradients
    return logits.detach(), gradients


def with_lora(seed: int) -> torch.nn.Module:
    model = get_peft_model(llama(seed), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.double()


def compiled_by_layer(seed: int) -> torch.nn.Module:
    model = llama(seed)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    return model


def outer_wraps(kind: str) -> dict[str, Any]:
    mesh = cp_mesh()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    make = {"PEFT": with_lora, "compiled layers": compiled_by_layer}[kind]
    torch.manual_seed(5)
    plain, model = make(0), make(0)
    model.load_state_dict(plain.state_dict())
    expected, expected_gradients = gradients_of(plain, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile says where its graph breaks
        applied = apply_context_parallel(model, mesh, {"model.layers.*.self_attn": "sdpa_hf"})
        logits, gradients = gradients_of(model, mesh)
    return {
        "names": [row.fqn for row in applied.report] == ["model.layers.0.self_attn", "model.layers.1.self_attn"],
        "logits": close(logits, expected),
        "trainable": gradients.keys() == expected_gradients.keys() and len(gradients) > 0,
        "gradients": all(
            (gradients[name] - gradient).norm() <= 1e-10 * gradient.norm() + 1e-14
            for name, gradient in expected_gradients.items()
        ),
    }


@pytest.mark.parametrize("kind", ["PEFT", "compiled layers"])
def test_names_match_as_the_user_wrote_them_and_the_numbers_hold(worlds: Any, kind: str) -> None:
    for found in worlds(2).run(outer_wraps, kind, time_limit=120):
        assert all(found.values()), found


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
    if kind == "softcap":
        torch.manual_seed(0)
        model: torch.nn.Module = Gemma2ForCausalLM(Gemma2Config(**SIZES, attn_logit_softcapping=4.0))
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
        ("softcap", r"model\.layers\.0\.self_attn: attn_logit_softcapping=4\.0 is not supported"),
        ("dropout", r"model\.layers\.0\.self_attn: attention_dropout=0\.5 is not supported"),
        ("rotary", r"rope_type=dynamic, which depends on the longest position"),
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
