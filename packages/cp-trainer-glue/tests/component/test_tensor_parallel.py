"""Under tensor parallelism each parameter's gradient is that of one process, for each family and each switch.

The oracle is one process with the unwrapped model and the whole batch, in float64.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from cp_collectives.testing import RankFailed
from cp_core import sequence_multiple, sum_gradients
from cp_trainer_glue import ModuleShardingSpec, ShardingApplier, ShardingPlanner, apply_sharding_plan
from cp_trainer_glue._parameter_bytes import parameter_bytes
from cp_trainer_glue._tensor_parallel import sum_tp_gradients
from cp_trainer_glue._tensor_parallel_plan import check_tensor_parallel
from cp_trainer_glue._vocab_parallel_loss import vocab_parallel_loss_sum

SEQ_LENGTH, VOCAB_SIZE = 15, 67  # no multiple of anything
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    "qwen3_moe-dense_layer": {"model_type": "qwen3_moe", "mlp_only_layers": [0], "attention_bias": True, **EXPERTS},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 16, **EXPERTS},
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3"},
    "glm4": {"model_type": "glm4"},
    "starcoder2": {"model_type": "starcoder2", "residual_dropout": 0.0, "embedding_dropout": 0.0},
}
WITH_SEQUENCE_PARALLEL = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe-dense_layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One set-up."""

    family: str
    cp: int = 1
    switches: dict[str, bool] = field(default_factory=dict)
    num_batches: int = 1
    checkpointing: bool = False

    @property
    def name(self) -> str:
        parts = (self.family, f"cp{self.cp}", *self.switches, f"accumulate{self.num_batches}")
        return "-".join((*parts, "recompute") if self.checkpointing else parts)


def build_model(family: str) -> Any:
    fields = {**SIZES, **FAMILIES[family]}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, attention_dropout=0.0)
    config.use_cache = False
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "attn_implementation": "sdpa", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **options).train()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB_SIZE, (count, 2, SEQ_LENGTH), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -100, ids)
    return [{"input_ids": i, "labels": la} for i, la in zip(ids, labels, strict=True)]


def reference(case: Case) -> dict[str, torch.Tensor | None]:
    model = build_model(case.family)
    for batch in batches(case.num_batches):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        token_loss_sum(logits[:, :-1], batch["labels"][:, 1:]).div(100).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def mesh_of(cp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (cp, dist.get_world_size() // cp), mesh_dim_names=("cp", "tp"))


def parallel_gradients(case: Case) -> dict[str, torch.Tensor | None]:
    """Return each parameter's gradient, whole."""
    mesh, model = mesh_of(case.cp), build_model(case.family)
    tp_size = mesh["tp"].size()
    specs = {} if case.cp == 1 else {"*.self_attn": ModuleShardingSpec(inner_wrapper="sdpa_hf", region_dispatch=False)}
    plan = ShardingPlanner(specs).plan(model, mesh, tp_size=tp_size, cp_size=case.cp, **case.switches)
    applier = ShardingApplier(plan, mesh)
    tp_grad_info = applier.split(model)
    applied = applier.apply(model)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    multiple = sequence_multiple(case.cp, applied.strategies) * tp_size
    for batch in batches(case.num_batches):
        local = applied.shard_batch(batch, multiple_of=multiple)
        labels = local.pop("shift_labels")
        if case.cp == 1:
            local.pop("cp_layout")
        logits = model(**local, use_cache=False).logits
        if case.switches.get("loss_parallel"):
            loss = vocab_parallel_loss_sum(logits, labels, tp_mesh=mesh["tp"], vocab_size=VOCAB_SIZE)
        else:
            loss = token_loss_sum(logits, labels)
        loss.div(100).backward()
    sum_gradients(model.parameters(), mesh["cp"])
    sum_tp_gradients(model, tp_grad_info, mesh["tp"])
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def whole(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def differing(case: Case) -> dict[str, str]:
    """Return the parameters whose gradients differ from those of one process, and how."""
    found = parallel_gradients(case)
    expected = reference(case)
    if list(found) != list(expected):
        return {"names": str(set(found) ^ set(expected))}
    largest = max(gradient.norm() for gradient in expected.values() if gradient is not None)
    wrong = {}
    for name, gradient in expected.items():
        other = found[name]
        if gradient is None or other is None:
            if gradient is not other:
                wrong[name] = "None on one side"
            continue
        error = (other - gradient).norm()
        if not error <= 1e-10 * gradient.norm() + 1e-14 * largest:
            wrong[name] = f"relative error {float(error / gradient.norm()):.1e}"
    return wrong


SWITCHES = {"sequence_parallel": True, "loss_parallel": True}
CASES = [
    *(Case(family=family) for family in FAMILIES),
    *(Case(family=family, switches=SWITCHES) for family in WITH_SEQUENCE_PARALLEL),
    Case(family="qwen3", switches={"sequence_parallel": True}, num_batches=3),
    Case(family="qwen3", switches={"loss_parallel": True}, checkpointing=True),
    *(Case(family=family, cp=2) for family in ("llama", "mistral", "qwen3")),
    Case(family="qwen3_moe", cp=2, num_batches=3),
    Case(family="qwen3_moe", cp=2, switches=SWITCHES, num_batches=3, checkpointing=True),
    Case(family="qwen3", cp=2, switches=SWITCHES),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_gradient_is_that_of_one_process(worlds: Any, case: Case) -> None:
    assert worlds(2 * case.cp).run(differing, case) == [{}] * (2 * case.cp)


def split_model(family: str, **switches: bool) -> tuple[Any, dict[str, Any]]:
    model, mesh = build_model(family), mesh_of(cp=1)
    plan = ShardingPlanner({}).plan(model, mesh, tp_size=mesh["tp"].size(), **switches)
    return apply_sharding_plan(model, plan, mesh)


def partial_parameters(**switches: bool) -> tuple[list[str], bool]:
    _, tp_grad_info = split_model("qwen3_moe", **switches)
    return list(tp_grad_info), all(dist.get_world_size(group) == 2 for group in tp_grad_info.values())


def test_the_parameters_whose_gradient_is_a_part_are_told_with_their_group(worlds: Any) -> None:
    names = [f"model.layers.{layer}.self_attn.{norm}.weight" for layer in (0, 1) for norm in ("q_norm", "k_norm")]
    assert worlds(2).run(partial_parameters) == [(names, True)] * 2
    kinds = ("input_layernorm", "post_attention_layernorm")
    norms = [f"model.layers.{layer}.{kind}.weight" for layer in (0, 1) for kind in kinds]
    found, _ = worlds(2).run(partial_parameters, sequence_parallel=True)[0]
    assert sorted(found) == sorted([*names, *norms, "model.norm.weight"])


def memory_and_ties() -> dict[str, Any]:
    model, _ = split_model("llama-tied")
    locals_ = [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    planned = check_tensor_parallel(build_model("llama-tied"), tp_size=2).plan
    held = sum(local.untyped_storage().nbytes() for local in locals_)
    return {
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "held": held,
        "planned": parameter_bytes(build_model("llama-tied"), planned, num_shards=1),
    }


def test_a_rank_keeps_its_shards_alone_and_tied_parameters_stay_tied(worlds: Any) -> None:
    first, second = worlds(2).run(memory_and_ties)
    assert first["tied"] and second["tied"]
    assert second["held"] < first["held"] == first["planned"]  # an odd vocabulary: the first rank has one row more


def logits_without_gradients(switches: dict[str, bool]) -> float:
    """Return the largest difference to one process of logits that a forward without gradients gives."""
    model, _ = split_model("llama", **switches)
    ids = batches(1)[0]["input_ids"][:, :14]
    columns = slice(34 * dist.get_rank(), 34 * (dist.get_rank() + 1)) if "loss_parallel" in switches else slice(None)
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=False).logits
        expected = build_model("llama")(input_ids=ids, use_cache=False).logits[..., columns]
    return float((found - expected).abs().max()) if found.shape == expected.shape else float("inf")


@pytest.mark.parametrize("switches", [{}, SWITCHES], ids=["plain", "switches"])
def test_a_forward_without_gradients_gives_the_same_logits(worlds: Any, switches: dict[str, bool]) -> None:
    assert max(worlds(2).run(logits_without_gradients, switches)) < 1e-12


def forward_of_uneven_shards() -> None:
    model, _ = split_model("llama", sequence_parallel=True)
    model(input_ids=batches(1)[0]["input_ids"], use_cache=False)


def test_tokens_that_cannot_be_cut_evenly_are_refused(worlds: Any) -> None:
    with pytest.raises(RankFailed, match="sequence_parallel cuts the 15 tokens of this rank into 2 equal shards; pad"):
        worlds(2).run(forward_of_uneven_shards)
