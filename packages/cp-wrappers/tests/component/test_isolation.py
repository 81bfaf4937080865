"""A wrapped model keeps to itself: configs, other models, later changes; and `remove` gives all of it back."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from cp_core import InvalidInputError, shard_batch_for_cp, unshard_sequence
from cp_wrappers import (
    Meshes,
    MethodDeclaration,
    apply_context_parallel,
    inner_wrapper,
    install_boundaries,
    plan_boundaries,
    register_cp_model_spec,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
DECLARED = {"*.self_attn": "sdpa_hf"}


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def llama(seed: int = 0, config: LlamaConfig | None = None) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(config or LlamaConfig(**SIZES)).double()


def tokens() -> torch.Tensor:
    return torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(3))


def logits_of(model: torch.nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    local = shard_batch_for_cp({"input_ids": tokens()}, mesh)
    return unshard_sequence(model(**local).logits.detach(), 1, mesh, local["cp_layout"])


def plain_logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=tokens(), use_cache=False).logits.detach()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-12 * expected.norm())


@inner_wrapper
def pass_through(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, hook: Any = None) -> Any:
    original = target_module.forward
    return lambda *args, **kwargs: original(*args, **kwargs)


# --- configs ------------------------------------------------------------------------------------------------------


def one_config_for_two_models(together: bool) -> dict[str, bool]:
    mesh, config = cp_mesh(), LlamaConfig(**SIZES)
    policy, reference = llama(1, config), llama(2, config)
    expected = [plain_logits(policy), plain_logits(reference)]
    found = {}
    if together:
        handles = [apply_context_parallel(torch.nn.ModuleDict({"a": policy, "b": reference}), mesh, DECLARED)]
    else:
        handles = [apply_context_parallel(policy, mesh, DECLARED)]
        found["the other is plain"] = torch.equal(plain_logits(reference), expected[1])
        handles.append(apply_context_parallel(reference, mesh, DECLARED))
    found["both wrapped"] = all(
        close(logits_of(m, mesh), e) for m, e in zip((policy, reference), expected, strict=True)
    )
    handles[0].remove()
    if not together:
        found["the other stays wrapped"] = close(logits_of(reference, mesh), expected[1])
        handles[1].remove()
    found["both plain again"] = all(
        torch.equal(plain_logits(m), e) for m, e in zip((policy, reference), expected, strict=True)
    )
    found["one config again"] = policy.config is reference.config is config
    found["as it was"] = (config._attn_implementation, config.use_cache) == ("sdpa", True)
    return found


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "in one apply"])
def test_models_may_share_a_config(worlds: Any, together: bool) -> None:
    for found in worlds(2).run(one_config_for_two_models, together):
        assert all(found.values()), found


def configs_of_their_own() -> dict[str, bool]:
    mesh, model = cp_mesh(), llama()
    expected = plain_logits(model)
    own = [copy.deepcopy(model.config) for _ in model.model.layers]
    for layer, config in zip(model.model.layers, own, strict=True):
        layer.self_attn.config = config
    applied = apply_context_parallel(model, mesh, DECLARED)
    found = {"wrapped": close(logits_of(model, mesh), expected)}
    applied.remove()
    found["given back"] = all(
        layer.self_attn.config is config for layer, config in zip(model.model.layers, own, strict=True)
    )
    return found


def test_attentions_may_have_configs_of_their_own(worlds: Any) -> None:
    for found in worlds(2).run(configs_of_their_own):
        assert all(found.values()), found


def several_implementations() -> dict[str, bool]:
    mesh, first, second = cp_mesh(), llama(1), llama(2)
    first.set_attn_implementation("eager")
    both = torch.nn.ModuleDict({"first": first, "second": second})
    expected = [plain_logits(first), plain_logits(second)]
    applied = apply_context_parallel(both, mesh, {"*.self_attn": pass_through})
    found = {
        "each runs its own": torch.equal(plain_logits(second), expected[1]) and close(plain_logits(first), expected[0])
    }
    applied.remove()
    names = [model.config._attn_implementation for model in (first, second)]
    return {**found, "each has its own again": names == ["eager", "sdpa"]}


def test_models_of_several_implementations_keep_them(worlds: Any) -> None:
    for found in worlds(2).run(several_implementations):
        assert all(found.values()), found


def saved_by_peft() -> dict[str, bool]:
    mesh = cp_mesh()
    model = get_peft_model(llama(), LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"])).double()
    expected = plain_logits(model)
    applied = apply_context_parallel(model, mesh, {"model.layers.*.self_attn": "sdpa_hf"})
    found = {
        "names": [row.fqn for row in applied.report] == ["model.layers.0.self_attn", "model.layers.1.self_attn"],
        "wrapped": close(logits_of(model, mesh), expected),
    }
    applied.remove()
    return {**found, "removed": torch.equal(plain_logits(model), expected)}


def test_what_peft_trains_in_full_is_wrapped(worlds: Any) -> None:
    for found in worlds(2).run(saved_by_peft):
        assert all(found.values()), found


# --- attention that runs as before --------------------------------------------------------------------------------


def under_a_users_wrapper(implementation: str) -> bool:
    mesh, model = cp_mesh(), llama()
    model.set_attn_implementation(implementation)
    expected = plain_logits(model)
    apply_context_parallel(model, mesh, {"*.self_attn": pass_through})
    return close(plain_logits(model), expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_under_a_users_wrapper_stays_causal(worlds: Any, implementation: str) -> None:
    assert worlds(2).run(under_a_users_wrapper, implementation) == [True, True]


def refusals() -> dict[str, str]:
    mesh, said = cp_mesh(), {}
    flex = llama()
    flex.set_attn_implementation("flex_attention")
    falcon = FalconForCausalLM(FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    dropping = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
    for name, model, declared in (
        ("flex", flex, {"*.self_attn": pass_through}),
        ("falcon", falcon, {"*.self_attention": "sdpa_hf"}),
        ("gpt2", dropping, {"*.attn": "sdpa_hf"}),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            apply_context_parallel(model, mesh, declared)
        said[name] = str(caught.value)
    return said


def test_what_cannot_be_served_is_refused_before_anything_changes(worlds: Any) -> None:
    for said in worlds(2).run(refusals):
        assert "attn_implementation 'flex_attention' takes causality from a mask" in said["flex"]
        assert "computes its attention by itself, not by its config's attention implementation" in said["falcon"]
        assert "transformer.h.0.attn: attention_dropout=0.1 is not supported" in said["gpt2"]


# --- handles ------------------------------------------------------------------------------------------------------


def installed_twice() -> dict[str, Any]:
    mesh, model = cp_mesh(), llama()
    expected = plain_logits(model)
    plans = plan_boundaries(model, [MethodDeclaration(match="*.self_attn", inner_wrapper="sdpa_hf")], cp_size=2)
    applied = install_boundaries(model, plans, meshes=Meshes(cp_mesh=mesh))
    with pytest.raises(RuntimeError, match="is wrapped already"):
        install_boundaries(model, plans, meshes=Meshes(cp_mesh=mesh))
    found = {"the first holds": close(logits_of(model, mesh), expected)}
    with pytest.raises(NotImplementedError, match="a wrapped model cannot be pickled"):
        pickle.dumps(model)
    forward = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(RuntimeError, match="was replaced after it was wrapped"):
        applied.remove()
    found["still wrapped"] = close(logits_of(model, mesh), expected)
    model.model.layers[0].self_attn.forward = forward
    applied.remove()
    return {**found, "removed": torch.equal(plain_logits(model), expected)}


def test_a_second_application_leaves_the_first_as_it_is(worlds: Any) -> None:
    for found in worlds(2).run(installed_twice):
        assert all(found.values()), found


@inner_wrapper
def reads_layout(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    original = target_module.forward

    def forward(*args: Any, cp_layout: Any = None, **kwargs: Any) -> Any:
        target_module.seen = cp_layout
        return original(*args, **kwargs)

    return forward


def layouts() -> dict[str, bool]:
    mesh, model = cp_mesh(), llama()
    applied = apply_context_parallel(model, mesh, {"*.self_attn": reads_layout})
    local = shard_batch_for_cp({"input_ids": tokens()}, mesh)
    layout = local.pop("cp_layout")
    applied.set_layout(layout)
    model(**local)
    found = {"a users wrapper sees it": all(layer.self_attn.seen is layout for layer in model.model.layers)}
    applied.remove()

    model = llama()
    expected = plain_logits(model)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)  # the first attention has no backward to wait for
    applied = apply_context_parallel(model, mesh, DECLARED)
    applied.set_layout(layout)
    kept = model(**local).logits
    other = shard_batch_for_cp({"input_ids": tokens()[:, :9]}, mesh)["cp_layout"]
    with pytest.raises(RuntimeError, match="awaits its backward"):
        applied.set_layout(other)
    again = unshard_sequence(model(**local).logits.detach(), 1, mesh, layout)
    return {**found, "a refused layout is set nowhere": close(again, expected) and kept.requires_grad}


def test_a_layout_that_is_set_reaches_all_attentions_or_none(worlds: Any) -> None:
    for found in worlds(2).run(layouts):
        assert all(found.values()), found


def data_of_any_kind() -> bool:
    mesh, model = cp_mesh(), llama()
    target = {"_target_": f"{__name__}.pass_through", "hook": lambda x: x}
    return len(apply_context_parallel(model, mesh, {"*.self_attn": target}).report) == 2


def test_data_may_be_objects_that_differ_by_address(worlds: Any) -> None:
    assert worlds(2).run(data_of_any_kind) == [True, True]


# --- batches ------------------------------------------------------------------------------------------------------


def with_a_first_token(batch: Any) -> Any:
    return {"input_ids": torch.nn.functional.pad(batch["tokens"], (1, 0))}


def prepared() -> dict[str, Any]:
    register_cp_model_spec(
        architecture="prepared", attention_targets=("*.self_attn",), batch_prepare_fn=with_a_first_token
    )
    mesh, policy, reference = cp_mesh(), llama(), llama()
    policy.config.model_type = reference.config.model_type = "prepared"
    both = torch.nn.ModuleDict({"policy": policy, "reference": reference})
    applied = apply_context_parallel(both, mesh, DECLARED)
    lengths = [applied.shard_batch({"tokens": tokens()})["cp_layout"].global_length]
    applied.remove()
    alone = apply_context_parallel(both, None, DECLARED)
    lengths.append(alone.shard_batch({"tokens": tokens()})["cp_layout"].global_length)
    return {"once": lengths == [14, 14]}


def test_a_batch_is_prepared_once_for_all_models_of_a_family_and_at_cp_size_1_too(worlds: Any) -> None:
    for found in worlds(2).run(prepared):
        assert all(found.values()), found


def test_at_cp_size_1_the_pads_of_the_layout_become_the_models_own_mask() -> None:
    batch = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}
    model = llama()
    expected = model(**batch, use_cache=False).logits
    applied = apply_context_parallel(model, None, {"*.self_attn": "sdpa_hf"})
    local = applied.shard_batch(batch)
    assert torch.equal(model(**local).logits[batch["attention_mask"] == 1], expected[batch["attention_mask"] == 1])
    inner = model.lm_head(model.model(**local).last_hidden_state)
    assert torch.equal(inner[0, 2:], expected[0, 2:])
    with pytest.raises(
        InvalidInputError, match=r"so nothing would hide them from model\.layers\.0\.self_attn \(LlamaAttention\); call"
    ):
        applied.set_layout(local["cp_layout"])
    applied.remove()
    unmasked = model(**local).logits
    assert not torch.equal(unmasked[0, 2:], expected[0, 2:])


def test_at_cp_size_1_a_model_without_a_mask_gets_no_pads() -> None:
    model = torch.nn.Linear(2, 2)
    local = apply_context_parallel(model, None, {}).shard_batch(
        {"input_ids": torch.zeros(1, 3, dtype=torch.long), "attention_mask": torch.tensor([[0, 1, 1]])}
    )
    with pytest.raises(InvalidInputError, match="but Linear takes no attention_mask; give its cp_layout to set_layout"):
        model(torch.zeros(1, 2), cp_layout=local["cp_layout"])
