"""Models that mix tokens in ways no method of this version serves are refused by name, before anything changes."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cp_core import ContextParallelError, UnsupportedError
from cp_wrappers import MethodDeclaration, check_declarations, plan_boundaries

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}
MIXES = r"mixes tokens along the sequence and no context-parallel method serves it"
OF_ITS_OWN = (
    r"multi-head latent attention \(kv_lora_rank=8\), which needs a wrapper of its own before keys and values are "
    r"expanded, is not supported"
)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_next": (
        "qwen3_next",
        {**LINEAR, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
        rf"model\.layers\.0\.linear_attn \(Qwen3NextGatedDeltaNet\) {MIXES}",
    ),
    "qwen3_5": ("qwen3_5_text", LINEAR, rf"model\.layers\.0\.linear_attn \(Qwen3_5GatedDeltaNet\) {MIXES}"),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4, "first_k_dense_replace": 1},
        rf"self_attn: layer type 'indexed_attention', an indexer that selects keys \(sparse attention\), {OF_ITS_OWN}",
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 1}, rf"layers\.0\.self_attn: {OF_ITS_OWN}"),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"]},
        rf"model\.layers\.0\.conv \(Lfm2ShortConv\) {MIXES}",
    ),
    "mamba": ("mamba", {"state_size": 4}, rf"backbone\.layers\.0\.mixer \(MambaMixer\) {MIXES}"),
    "gemma2": (
        "gemma2",
        {"attn_logit_softcapping": 4.0},
        r"model\.layers\.0\.self_attn: attn_logit_softcapping=4\.0 is",
    ),
    "llama4": (
        "llama4_text",
        {"num_local_experts": 2, "attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]},
        r"model\.layers\.0\.self_attn: layer type 'chunked_attention'",
    ),
}


@pytest.mark.parametrize(("name", "options", "sentence"), MODELS.values(), ids=MODELS.keys())
def test_a_model_that_no_method_serves_is_refused_by_name(name: str, options: dict[str, Any], sentence: str) -> None:
    config = CONFIG_MAPPING[name](**{**SIZES, **options})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    methods = [MethodDeclaration(match="*.self_attn", inner_wrapper="sdpa_hf")]
    assert check_declarations(model, methods, cp_size=1, device=torch.device("cpu")).plans == ()
    with pytest.raises(ContextParallelError, match=sentence) as refusal:
        plan_boundaries(model, methods, cp_size=2, device=torch.device("cpu"))
    if name != "mamba":  # it has no attention at all, which is a fault of the declaration
        assert isinstance(refusal.value, UnsupportedError)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_causal_convolution_of_the_users_own_beside_attention_is_refused() -> None:
    config = CONFIG_MAPPING["llama"](**SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.model.layers[1].mlp.mix = torch.nn.Conv1d(32, 32, 4)
    methods = [MethodDeclaration(match="*.self_attn", inner_wrapper="sdpa_hf")]
    with pytest.raises(UnsupportedError, match=rf"model\.layers\.1\.mlp\.mix \(Conv1d\) {MIXES}"):
        plan_boundaries(model, methods, cp_size=2, device=torch.device("cpu"))
