"""The model spec of transformers' Qwen3-MoE."""

from cp_wrappers import ModelSpec, register_cp_model_spec


def register_model_spec() -> ModelSpec:
    """Register where the attentions of Qwen3-MoE are; it chooses no method.

    Returns:
        The spec of `model_type` `qwen3_moe`.
    """
    return register_cp_model_spec(architecture="qwen3_moe", attention_targets=("*layers.*.self_attn",))
