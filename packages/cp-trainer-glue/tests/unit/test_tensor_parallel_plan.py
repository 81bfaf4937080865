"""What tensor parallelism would do to a model, and each reason why it cannot, is known without ranks."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cp_core import AllGatherStrategy, AttentionShape, InvalidInputError
from cp_trainer_glue import ModuleShardingSpec, ShardingPlanner
from cp_trainer_glue._parameter_bytes import parameter_bytes
from cp_trainer_glue._planner import plan_error
from cp_trainer_glue._tensor_parallel_plan import check_tensor_parallel
from cp_wrappers import inner_wrapper

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
GLM4_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 8,
}


def skeleton(model_type: str, **fields: Any) -> Any:
    config = AutoConfig.for_model(model_type, **{**SIZES, **fields})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


BAD, UNSUPPORTED = ValueError, NotImplementedError
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "no plan": (
        "stablelm",
        {},
        {},
        UNSUPPORTED,
        r"transformers has no tensor-parallel plan for StableLmForCausalLM; leave tp_size",
    ),
    "style": (
        "deepseek_v2",
        {
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "n_routed_experts": 4,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
        {},
        BAD,
        r"DeepseekV2ForCausalLM uses 'mla_kv_a_proj' \(model\.layers\.0\.self_attn\.kv_a_proj_with_mqa",
    ),
    "forgotten norms": (
        "glm4_moe",
        {**GLM4_MOE, "use_qk_norm": True},
        {},
        UNSUPPORTED,
        r"does not say what becomes of model\.layers\.0\.self_attn\.q_norm\.weight, which stands among split layers",
    ),
    "dropout": (
        "llama",
        {"attention_dropout": 0.1},
        {},
        UNSUPPORTED,
        r"model\.config\.attention_dropout is 0\.1, and dropout would",
    ),
    "heads": (
        "llama",
        {"num_key_value_heads": 2},
        {"tp_size": 4},
        BAD,
        r"self_attn: tensor parallelism splits heads: num_q_heads \(8\) and num_kv_heads \(2\) must be divisible by tp_"
        r"size \(4\); use",
    ),
    "width": (
        "llama",
        {"intermediate_size": 42},
        {"tp_size": 4},
        BAD,
        r"mlp\.gate_proj\.weight \[42, 32\]: tensor parallelism splits its 42 features, .* by tp_size \(4\)",
    ),
    "experts' width": (
        "qwen3_moe",
        {"num_experts": 4, "moe_intermediate_size": 6, "head_dim": 8},
        {"tp_size": 4},
        BAD,
        r"gate_up_proj \[4, 12, 32\]: tensor parallelism splits its 6 features",
    ),
    "sequence_parallel": (
        "olmo2",
        {},
        {"sequence_parallel": True},
        UNSUPPORTED,
        r"sequence_parallel: proven for llama, mistral, qwen2, qwen3, qwen3_moe and not for olmo2",
    ),
}


@pytest.mark.parametrize(("family", "fields", "options", "kind", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_proven_is_refused_by_name(
    family: str, fields: dict[str, Any], options: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    model = skeleton(family, **fields)
    check = ShardingPlanner({}).check(model, cp_size=1, **{"tp_size": 2, **options})
    assert check.tensor_parallel is None
    with pytest.raises(kind, match=sentence):
        raise plan_error(check)


def test_fused_projections_that_would_be_split_are_refused() -> None:
    model = skeleton("llama")
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Linear(32, 96, bias=False, device="meta")
    (fault,) = check_tensor_parallel(model, tp_size=2).faults
    assert "model.layers.0.self_attn.q_proj has 96 output features, which are neither its attention's" in fault.message


def test_a_layer_that_is_no_plain_linear_one_is_refused() -> None:
    class Adapter(torch.nn.Linear):
        """What an adapter puts in the place of a linear layer."""

    model = skeleton("llama")
    model.model.layers[1].mlp.up_proj = Adapter(32, 48, bias=False, device="meta")
    (fault,) = check_tensor_parallel(model, tp_size=2).faults
    assert "model.layers.1.mlp.up_proj would be split as a linear layer, but is a Adapter" in fault.message


def test_loss_parallel_needs_an_output_layer_that_is_split() -> None:
    model = skeleton("llama")
    model.tp_plan = {rule: style for rule, style in model.tp_plan.items() if rule != "lm_head"}
    assert check_tensor_parallel(model, tp_size=2).plan is not None
    (fault,) = check_tensor_parallel(model, tp_size=2, loss_parallel=True).faults
    assert "loss_parallel: the plan of LlamaForCausalLM does not split its output layer" in fault.message


def test_without_tensor_parallelism_nothing_is_looked_at() -> None:
    check = check_tensor_parallel(torch.nn.Linear(2, 2), tp_size=1)
    assert check.plan is None
    assert check.faults == ()


class SplitsHeads(AllGatherStrategy):
    def validate_shape(self, cp_size: int, shape: AttentionShape) -> None:
        if shape.num_kv_heads % cp_size:
            raise InvalidInputError(f"{shape.fqn}: {shape.num_kv_heads} heads on {cp_size} ranks")


@inner_wrapper(strategy=lambda: SplitsHeads())
def splits_heads(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any: ...


def checked(family: str, match: str = "*.self_attn", *, tp_size: int, cp_size: int) -> Any:
    spec = ModuleShardingSpec(inner_target="self", inner_wrapper=splits_heads, region_dispatch=False)
    return ShardingPlanner({match: spec}).check(
        skeleton(family), cp_size=cp_size, tp_size=tp_size, device=torch.device("cpu")
    )


def test_methods_are_checked_on_the_heads_that_a_rank_has_after_tensor_parallelism() -> None:
    shapes = {plan.shape for plan in checked("llama", tp_size=2, cp_size=2).boundaries}
    assert {(shape.num_q_heads, shape.num_kv_heads) for shape in shapes} == {(4, 2)}
    assert checked("llama", tp_size=1, cp_size=4).faults == ()
    (fault,) = checked("llama", tp_size=2, cp_size=4).faults
    assert fault.message.startswith("model.layers.0.self_attn: 2 heads on 4 ranks")


def test_where_projections_are_gathered_each_rank_has_all_heads() -> None:
    check = checked("olmo2", tp_size=2, cp_size=4)
    assert check.faults == ()
    assert {plan.shape.num_kv_heads for plan in check.boundaries} == {4}


def test_the_suggestion_serves_the_heads_of_a_rank() -> None:
    """The declared method of one attention is carried over to the other only where it serves these heads."""

    def suggested(tp_size: int) -> set[object]:
        suggestion = checked("llama", "*.0.self_attn", tp_size=tp_size, cp_size=4).suggestion
        return {declaration.inner_wrapper for declaration in suggestion.declarations}

    assert suggested(1) == {splits_heads}
    assert suggested(2) == {"sdpa_hf"}


def test_parameter_bytes_are_those_of_the_largest_shards() -> None:
    model = skeleton("llama")
    sizes = {name: parameter.numel() * 4 for name, parameter in model.named_parameters()}
    plan = check_tensor_parallel(model, tp_size=2).plan
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    vocabulary = 2 * 34 * 32 * 4  # 67 rows of two tables
    split = sum(size for name, size in sizes.items() if "proj" in name) // 2
    assert parameter_bytes(model, None, num_shards=1) == sum(sizes.values())
    assert parameter_bytes(model, plan, num_shards=1) == norms + vocabulary + split
    assert parameter_bytes(model, plan, num_shards=4) == norms // 4 + 2 * 9 * 32 * 4 + split // 4
