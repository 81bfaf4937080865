"""In every mesh and gradient domain the gradients are those of one process, each of them, and so is what follows.

The oracle is one process with the unwrapped model and the whole batch of a step at once, in float64. A step has twelve
samples in three groups with 1, 7 and 30 labels, so every partition over ranks and micro-batches is uneven.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from cp_collectives import current_platform, gather_objects
from cp_collectives.testing import RankFailed
from cp_core import GlobalLoss, _grad_norm, mean_global_loss, tensor_digest
from cp_trainer_glue import BaseTrainer, TextTrainer, TrainerConfig, _gradient_domain, _trainer

NUM_STEPS, SAMPLES_OF_STEP, SEQ_LENGTH, VOCAB_SIZE = 3, 12, 30, 96
LABELS_OF_GROUP = (1, 7, 30)
MAX_NORM, LEARNING_RATE = 0.5, 0.1
MODELS = {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "initializer_range": 0.1,
    },
    "llama": {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
    },
}
HF_CONFIGS = {"qwen3_moe": Qwen3MoeConfig, "llama": LlamaConfig}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One set-up of a run."""

    dp: int
    cp: int
    tp: int = 1
    # none, fsdp (dp_shard), or hsdp (dp_replicate).
    domain: str = "none"
    accumulation: int = 1
    # none, full, attention, or reentrant (full).
    recomputation: str = "none"
    compiled: bool = False
    mode: str = "production"
    model: str = "qwen3_moe"

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def name(self) -> str:
        mesh = f"dp{self.dp}-cp{self.cp}-tp{self.tp}"
        form = f"{self.domain}-accumulate{self.accumulation}-recompute_{self.recomputation}-{self.mode}"
        return f"{mesh}-{form}{'-compiled' if self.compiled else ''}"

    def config(self) -> TrainerConfig:
        sharded = "dp_shard_size" if self.domain == "fsdp" else "dp_replicate_size"
        return TrainerConfig.model_validate(
            {
                "output_dir": "runs/never_written",
                "sharding_mode": self.mode,
                "model": {"config": MODELS[self.model], "dtype": "float64"},
                "data": {"source": "stdlib", "seq_length": SEQ_LENGTH},
                "training": {
                    "train_iters": NUM_STEPS,
                    "global_batch_size": SAMPLES_OF_STEP,
                    "micro_batch_size": SAMPLES_OF_STEP // self.dp // self.accumulation,
                    "max_grad_norm": MAX_NORM,
                    "activation_checkpoint": "full" if self.recomputation == "reentrant" else self.recomputation,
                    "checkpoint_reentrant": self.recomputation == "reentrant",
                    "compile": "layers" if self.compiled else "none",
                    "compile_backend": "aot_eager",
                },
                "optimizer": {"name": "sgd", "lr": LEARNING_RATE},
                "accelerator": {sharded: self.dp, "cp_size": self.cp, "tp_size": self.tp},
                **({} if self.domain == "none" else {"fsdp": {}}),
                "plan_overrides": [
                    {
                        "match": "*.self_attn",
                        "when": "cp",
                        "region_dispatch": False,
                        "inner_target": "self",
                        "inner_wrapper": "sdpa_hf",
                    }
                ],
            }
        )


def samples_of_step(step: int) -> dict[str, torch.Tensor]:
    """Return `[12, S]` ids and labels; group g of four samples has `LABELS_OF_GROUP[g]` labels in all."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB_SIZE, (SAMPLES_OF_STEP, SEQ_LENGTH), generator=generator)
    labels = torch.full_like(ids, -100)
    for group, count in enumerate(LABELS_OF_GROUP):
        rows = slice(4 * group, 4 * group + 4)
        places = torch.randperm(4 * (SEQ_LENGTH - 1), generator=generator)[:count]
        chosen = torch.zeros(4, SEQ_LENGTH, dtype=torch.bool)
        chosen[places // (SEQ_LENGTH - 1), places % (SEQ_LENGTH - 1) + 1] = True  # the first token is no target
        labels[rows] = torch.where(chosen, ids[rows], labels[rows])
    return {"input_ids": ids, "labels": labels}


class Samples:
    """The samples of all steps as the micro-batches of one data-parallel rank."""

    def __init__(self, case: Case, dp_rank: int) -> None:
        self._case, self._dp_rank = case, dp_rank

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        size = SAMPLES_OF_STEP // self._case.dp // self._case.accumulation
        for micro_batch in itertools.count():
            step, index = divmod(micro_batch, self._case.accumulation)
            start = (index * self._case.dp + self._dp_rank) * size
            yield {name: tensor[start : start + size] for name, tensor in samples_of_step(step).items()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_trainer(case: Case) -> TextTrainer:
    class SampleTrainer(TextTrainer):
        def build_data(self) -> Any:
            return Samples(case, self.meshes.dp_rank)

        def build_model(self) -> torch.nn.Module:
            return build_model(case.model)

    platform = current_platform("cpu")
    return SampleTrainer(case.config(), platform, platform.device(0))


def build_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    fields = {key: value for key, value in MODELS[name].items() if key != "model_type"}
    config = HF_CONFIGS[name](**fields)
    experts = {"experts_implementation": "eager"} if name == "qwen3_moe" else {}
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="sdpa", **experts
    )
    model.config.use_cache = False
    return model


def oracle(model_name: str) -> list[dict[str, Any]]:
    """Return loss, gradients, norm and parameters after each step of one process."""
    model, steps = build_model(model_name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(NUM_STEPS):
        batch = samples_of_step(step)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        parameters = {name: param.detach().clone() for name, param in model.named_parameters()}
        steps.append({"loss": loss.item(), "gradients": gradients, "norm": norm.item(), "parameters": parameters})
    return steps


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def run_steps(case: Case) -> list[dict[str, Any]]:
    trainer, steps = make_trainer(case), []
    for _ in range(NUM_STEPS):
        window = trainer.next_window()
        loss = trainer.accumulate(window)
        trainer.reduce_gradients()
        gradients = {n: None if p.grad is None else whole(p.grad) for n, p in trainer.model.named_parameters()}
        norm = trainer.clip_gradients()
        trainer.update()
        parameters = {name: whole(param) for name, param in trainer.model.named_parameters()}
        steps.append({"loss": loss.item(), "gradients": gradients, "norm": norm.item(), "parameters": parameters})
    return steps


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest error of design.md section 6 over all tensors, in units of what is allowed."""
    if found.keys() != expected.keys() or any((found[n] is None) != (expected[n] is None) for n in expected):
        return float("inf")
    norms = {name: float(value.norm()) for name, value in expected.items() if value is not None}
    floor = 1e-14 * max(norms.values())
    return max(float((found[n] - expected[n]).norm()) / (1e-10 * norm + floor) for n, norm in norms.items())


def compare(case: Case) -> dict[str, Any]:
    expected, found = oracle(case.model), run_steps(case)
    digests = {name: tensor_digest(value) for name, value in found[-1]["parameters"].items()}
    everywhere = gather_objects(digests, mesh=world_mesh())
    return {
        "loss": max(abs(f["loss"] - e["loss"]) / e["loss"] for f, e in zip(found, expected, strict=True)),
        "norm": max(abs(f["norm"] - e["norm"]) / e["norm"] for f, e in zip(found, expected, strict=True)),
        "gradients": distance(found[0]["gradients"], expected[0]["gradients"]),
        "later gradients": max(
            distance(f["gradients"], e["gradients"]) for f, e in zip(found[1:], expected[1:], strict=True)
        ),
        "parameters": distance(found[-1]["parameters"], expected[-1]["parameters"]),
        "replicas": all(other == everywhere[0] for other in everywhere),
    }


def world_mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("everyone",))


MESHES = [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]
DOMAINS = ["none", "fsdp", "hsdp"]


def full_matrix() -> list[Case]:
    choices = itertools.product(MESHES, DOMAINS, (1, 3), ("none", "full"), ("production", "validate"))
    cases = [
        Case(dp=dp, cp=cp, tp=tp, domain=domain, accumulation=accumulation, recomputation=recomputation, mode=mode)
        for (dp, cp, tp), domain, accumulation, recomputation, mode in choices
    ]
    return [case for case in cases if case.domain != "hsdp" or case.dp > 1]


def pairwise(cases: list[Case]) -> list[Case]:
    """Return cases that hold every pair of values that the full matrix holds, greedily."""

    def pairs(case: Case) -> set[Any]:
        mesh = (case.dp, case.cp, case.tp)
        values = enumerate((mesh, case.domain, case.accumulation, case.recomputation, case.mode))
        return set(itertools.combinations(values, 2))

    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


SELECTED = pairwise(full_matrix())
OTHERS = [
    Case(dp=1, cp=2, recomputation="attention", accumulation=3),
    Case(dp=1, cp=2, recomputation="attention", domain="fsdp", accumulation=3),
    Case(dp=1, cp=2, recomputation="reentrant"),
    Case(dp=1, cp=2, recomputation="reentrant", domain="fsdp", accumulation=3),
    Case(dp=1, cp=2, compiled=True),
    Case(dp=1, cp=2, compiled=True, domain="fsdp", recomputation="full", accumulation=3),
    Case(dp=1, cp=2, model="llama", domain="fsdp", accumulation=3),
    Case(dp=2, cp=2, model="llama", domain="hsdp", recomputation="attention"),
]


def require_parity(found: dict[str, Any]) -> None:
    assert found["loss"] < 1e-12
    assert found["norm"] < 1e-10
    assert found["gradients"] < 1
    assert found["later gradients"] < 10  # the parameters differ by rounding by then
    assert found["parameters"] < 1
    assert found["replicas"]


@pytest.mark.parity
@pytest.mark.parametrize("case", [*SELECTED, *OTHERS], ids=lambda case: f"{case.model}-{case.name}")
def test_a_set_up_trains_as_one_process(worlds: Any, case: Case) -> None:
    for found in worlds(case.world_size).run(compare, case):
        require_parity(found)


@pytest.mark.parity
@pytest.mark.full
@pytest.mark.parametrize("case", full_matrix(), ids=lambda case: case.name)
def test_every_set_up_trains_as_one_process(worlds: Any, case: Case) -> None:
    for found in worlds(case.world_size).run(compare, case):
        require_parity(found)


# --- faults on purpose ----------------------------------------------------------------------------------------------


def broken(case: Case, fault: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        return compare(case)


def _loss_averaged_per_rank(patch: pytest.MonkeyPatch) -> None:
    def mean_per_rank(loss_sum: torch.Tensor, count: int, *, dp_cp_mesh: Any, **_: Any) -> GlobalLoss:
        mean = loss_sum / max(count, 1) / dp_cp_mesh.size()
        return GlobalLoss(backward=mean, logged=mean.detach(), valid_tokens=count)

    patch.setattr(_trainer, "mean_global_loss", mean_per_rank)


def _gradients_times_cp(patch: pytest.MonkeyPatch) -> None:
    def scaled(*args: Any, **options: Any) -> GlobalLoss:
        return mean_global_loss(*args, **{**options, "grad_average_degree": 2})

    patch.setattr(_trainer, "mean_global_loss", scaled)


def _tokens_of_data_parallel_only(patch: pytest.MonkeyPatch) -> None:
    original = BaseTrainer.next_window

    def counted_once(self: Any) -> Any:
        window = original(self)
        return dataclasses.replace(window, valid_tokens=sum(window.counts))

    patch.setattr(BaseTrainer, "next_window", counted_once)


def _norm_of_the_own_shard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_grad_norm, "_norm_over_ranks", lambda norm, *_: norm)


def _gradients_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_gradient_domain, "sum_gradients", lambda *_: None)


def _always_synchronised_as_last(patch: pytest.MonkeyPatch) -> None:
    original = _gradient_domain.GradientDomain.will_reduce
    patch.setattr(_gradient_domain.GradientDomain, "will_reduce", lambda self, _: original(self, False))


FAULTS = {
    "loss averaged per rank": _loss_averaged_per_rank,
    "gradients times cp": _gradients_times_cp,
    "tokens of this rank only": _tokens_of_data_parallel_only,
    "norm of the own shard": _norm_of_the_own_shard,
    "gradients not summed": _gradients_not_summed,
    "never synchronised": _always_synchronised_as_last,
}
RED = {
    "loss averaged per rank": (Case(dp=1, cp=2), "gradients"),
    "gradients times cp": (Case(dp=1, cp=2, domain="fsdp"), "gradients"),
    "tokens of this rank only": (Case(dp=1, cp=2), None),
    "norm of the own shard": (Case(dp=1, cp=2, domain="fsdp"), "norm"),
    "gradients not summed": (Case(dp=1, cp=2), "gradients"),
    "never synchronised": (Case(dp=1, cp=2, domain="fsdp"), "gradients"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(worlds: Any, fault: str) -> None:
    case, place = RED[fault]
    if place is None:  # our own check of the window stops it before a gradient exists
        with pytest.raises(RankFailed, match=r"is less than|must be the same on all ranks"):
            worlds(case.world_size).run(broken, case, fault)
        return
    for found in worlds(case.world_size).run(broken, case, fault):
        assert found[place] > 1e-3
