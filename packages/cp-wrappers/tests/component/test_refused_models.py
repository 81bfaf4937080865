"""Models that mix tokens in ways no method of this version serves are refused by name, before anything changes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BartForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralForCausalLM,
    OPTForCausalLM,
)

from cp_core import ContextParallelError, InvalidInputError, UnsupportedError
from cp_wrappers import (
    MethodDeclaration,
    apply_context_parallel,
    check_declarations,
    find_attention_boundaries,
    plan_boundaries,
)

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


HEADS = {"_target_": "sdpa_hf", "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("wrapper", "sentence"),
    [
        ("sdpa_qkv", "is a module of transformers, which are served by sdpa_hf"),
        (HEADS, "its heads are those of its transformers config; leave num_q_heads out"),
    ],
    ids=["sdpa_qkv", "declared heads"],
)
def test_attention_of_transformers_keeps_its_own_way(wrapper: Any, sentence: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES))
    with pytest.raises(ContextParallelError, match=sentence):
        methods = [MethodDeclaration(match="*.self_attn", inner_wrapper=wrapper)]
        plan_boundaries(model, methods, cp_size=2, device=torch.device("cpu"))


def test_attention_of_transformers_that_asks_no_config_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["bloom"](hidden_size=32, n_layer=1, n_head=4))
    (name,) = find_attention_boundaries(model)
    with pytest.raises(UnsupportedError, match=r"module of transformers, .* only where their config names the att"):
        plan_boundaries(model, [MethodDeclaration(match=name, inner_wrapper="sdpa_hf")], cp_size=2)


OPT = {"vocab_size": 32, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "config", "sentence"),
    [
        (
            LlamaForSequenceClassification,
            CONFIG_MAPPING["llama"](**SIZES, pad_token_id=0),
            r"the model itself \(LlamaForSequenceClassification\) pools over the sequence: each rank would",
        ),
        (
            BartForCausalLM,
            CONFIG_MAPPING["bart"](d_model=32, decoder_layers=2, decoder_attention_heads=4, vocab_size=32),
            r"model\.decoder \(BartDecoder\) takes no position_ids: on each rank its positions would start at 0\.",
        ),
        (
            MixtralForCausalLM,
            CONFIG_MAPPING["mixtral"](**SIZES, num_local_experts=2, output_router_logits=True),
            r"self_attn: output_router_logits, whose load-balancing loss is no sum over tokens, is not supported",
        ),
    ],
    ids=["a head that pools", "positions of its own", "a loss of experts"],
)
def test_parts_beside_the_attentions_that_a_shard_would_break_are_refused(
    kind: Any, config: Any, sentence: str
) -> None:
    with torch.device("meta"):
        model = kind(config)
    methods = [MethodDeclaration(match="*.self_attn", inner_wrapper="sdpa_hf")]
    with pytest.raises(ContextParallelError, match=sentence):
        plan_boundaries(model, methods, cp_size=2, device=torch.device("cpu"))


def forwards_that_are_refused() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = OPTForCausalLM(
        CONFIG_MAPPING["opt"](**OPT, word_embed_proj_dim=32, max_position_embeddings=16, dropout=0.0)
    )
    applied = apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    ids = torch.arange(12).view(2, 6)
    sentences = []
    for mask in (torch.tensor([[1] * 6, [0] + [1] * 5]), torch.tensor([[1] * 6, [1] * 5 + [0]])):
        try:
            model(**applied.shard_batch({"input_ids": ids, "attention_mask": mask}))
            sentences.append("taken")
        except UnsupportedError as error:
            sentences.append(str(error))
    if mesh.size() == 1:  # nothing is wrapped
        return sentences
    llama = LlamaForCausalLM(CONFIG_MAPPING["llama"](**SIZES))
    apply_context_parallel(llama, mesh, {"*.self_attn": "sdpa_hf"})
    try:
        llama.model.layers[0].self_attn(torch.zeros(1, 3, 32), key_value_states=torch.zeros(1, 3, 32))
    except UnsupportedError as error:
        sentences.append(str(error))
    return sentences


def calls_that_are_refused() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = LlamaForCausalLM(CONFIG_MAPPING["llama"](**SIZES))
    applied = apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    ids = torch.arange(12).view(2, 6)
    local = applied.shard_batch({"input_ids": ids, "labels": ids})
    layout, shift_labels = local["cp_layout"], local.pop("shift_labels")
    wrong: list[dict[str, Any]] = [
        {"input_ids": local["input_ids"], "cp_layout": layout},
        {**local, "labels": local["input_ids"]},
    ]
    sentences = []
    for call in wrong:
        for entry in (model, model.model) if "labels" not in call else (model,):
            with pytest.raises(InvalidInputError) as refusal:
                entry(**call)
            sentences.append(str(refusal.value))
    model(**local, labels=shift_labels, shift_labels=shift_labels)
    model(local["input_ids"], None, local["position_ids"], cp_layout=layout)
    applied.remove()
    model(input_ids=ids, labels=ids)
    return sentences


def test_a_call_without_positions_or_with_unshifted_labels_is_refused(worlds: Any) -> None:
    for positions, of_the_base, labels in worlds(2).run(calls_that_are_refused):
        assert positions.startswith("LlamaForCausalLM was called with a cp_layout but no position_ids, which it would")
        assert of_the_base.startswith("LlamaModel was called with a cp_layout but no position_ids")
        assert labels.startswith("LlamaForCausalLM was called with labels, which it would shift on this rank's shard")


@pytest.mark.parametrize("cp_size", [1, 2], ids="C{}".format)
def test_pads_that_shift_learned_positions_and_cross_attention_are_refused_in_forward(
    worlds: Any, cp_size: int
) -> None:
    for leading, trailing, *crossing in worlds(cp_size).run(forwards_that_are_refused):
        assert (
            "opt counts positions in its attention mask, so that pads before the tokens of a row would shift" in leading
        )
        assert trailing == "taken"
        starts = [sentence.partition(", whose")[0] for sentence in crossing]
        assert starts == ["model.layers.0.self_attn was given key_value_states: cross attention"] * (cp_size > 1)


def test_a_causal_convolution_of_the_users_own_beside_attention_is_refused() -> None:
    config = CONFIG_MAPPING["llama"](**SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.model.layers[1].mlp.mix = torch.nn.Conv1d(32, 32, 4)
    methods = [MethodDeclaration(match="*.self_attn", inner_wrapper="sdpa_hf")]
    with pytest.raises(UnsupportedError, match=rf"model\.layers\.1\.mlp\.mix \(Conv1d\) {MIXES}"):
        plan_boundaries(model, methods, cp_size=2, device=torch.device("cpu"))
