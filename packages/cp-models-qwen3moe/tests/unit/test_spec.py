"""The model spec of Qwen3-MoE is found through its entry point and says where the attentions are."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import cp_models_qwen3moe
from cp_models_qwen3moe import register_model_spec
from cp_wrappers import find_attention_boundaries, model_spec


def tiny_model(num_hidden_layers: int = 3) -> torch.nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
    )
    return Qwen3MoeForCausalLM(config)


def test_public_names_are_what_all_says() -> None:
    public = {name for name in vars(cp_models_qwen3moe) if not name.startswith("_") and name != "version"}
    assert public == set(cp_models_qwen3moe.__all__)


def test_spec_is_found_without_being_registered_by_hand() -> None:
    spec = model_spec("qwen3_moe")
    assert spec is not None
    assert spec == register_model_spec()


def test_every_attention_of_a_causal_lm_is_found() -> None:
    assert list(find_attention_boundaries(tiny_model())) == [f"model.layers.{index}.self_attn" for index in range(3)]


def test_every_attention_of_the_bare_model_is_found() -> None:
    assert list(find_attention_boundaries(tiny_model(2).model)) == [f"layers.{index}.self_attn" for index in range(2)]
