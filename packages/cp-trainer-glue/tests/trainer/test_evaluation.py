"""Evaluation and prediction over ranks are those of one process, and training goes on as if they had not been.

Seven samples of 30 tokens, two rows at once: the last forward is short on every mesh, and shards are padded for four
ranks. Labels are few and uneven, one sample has none, and several ranks see none in a whole forward.
"""

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from cp_collectives import current_platform
from cp_collectives.testing import RankFailed
from cp_trainer_glue import EvalResult, HyperAutoModel, Prediction, TextTrainer, TrainerConfig

VOCAB_SIZE, SEQ_LENGTH, NUM_SAMPLES = 97, 30, 7
# The labels of each sample: from where on, and how many.
LABELS = ((20, 9), (0, 0), (3, 2), (1, 29), (28, 1), (10, 5), (25, 5))
FIELDS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One layout of ranks."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp


CASES = {
    "one process": Case(),
    "cp2": Case(cp=2),
    "cp4": Case(cp=4),
    "dp2": Case(dp=2),
    "dp2-cp2": Case(dp=2, cp=2),
    "cp2-fsdp": Case(cp=2, changes={"fsdp": {}}),
    "dp2-cp2-fsdp": Case(dp=2, cp=2, changes={"accelerator": {"dp_shard_size": 2}}),
    "dp2-cp2-hsdp": Case(dp=2, cp=2, changes={"fsdp": {}}),
    "cp2-tp2": Case(cp=2, tp=2),
    "cp2-tp2-loss_parallel": Case(cp=2, tp=2, changes={"accelerator": {"loss_parallel": True}}),
    "cp2-tp2-sequence_parallel": Case(cp=2, tp=2, changes={"accelerator": {"sequence_parallel": True}}),
    "cp2-compiled": Case(cp=2, changes={"training": {"compile": "layers", "compile_backend": "aot_eager"}}),
    "cp2-recomputed": Case(cp=2, changes={"training": {"activation_checkpoint": "full"}}),
    "cp2-chunks": Case(cp=2, changes={"loss": {"chunk_tokens": 4}}),
}


def config_of(case: Case) -> TrainerConfig:
    """Return the config of a case; `changes` go into its sections."""
    axes = {"cp_size": case.cp, "tp_size": case.tp}
    if "dp_shard_size" not in case.changes.get("accelerator", {}):
        axes["dp_replicate_size"] = case.dp
    content: dict[str, Any] = {
        "output_dir": "runs/never_written",
        "model": {"config": {"model_type": "llama", **FIELDS}, "dtype": "float64"},
        "data": {"source": "stdlib", "seq_length": SEQ_LENGTH},
        "training": {"train_iters": 4, "global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "accelerator": axes,
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
    for section, values in case.changes.items():
        content[section] = {**content.get(section, {}), **values}
    return TrainerConfig.model_validate(content)


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        LlamaConfig(**FIELDS), dtype=torch.float64, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    return model


def samples() -> list[dict[str, torch.Tensor]]:
    generator, found = torch.Generator().manual_seed(1), []
    for start, count in LABELS:
        ids = torch.randint(VOCAB_SIZE, (SEQ_LENGTH,), generator=generator)
        labels = torch.full_like(ids, -100)
        labels[start : start + count] = ids[start : start + count]
        found.append({"input_ids": ids, "labels": labels})
    return found


class RandomBatches:
    """The training data: batches of this data-parallel rank."""

    def __init__(self, dp_rank: int) -> None:
        self._dp_rank = dp_rank

    def __iter__(self) -> Any:
        for number in itertools.count():
            generator = torch.Generator().manual_seed(1000 * self._dp_rank + number)
            ids = torch.randint(VOCAB_SIZE, (2, SEQ_LENGTH), generator=generator)
            yield {"input_ids": ids, "labels": ids.clone()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SampleTrainer(TextTrainer):
    """Trains and evaluates on the samples above."""

    def build_data(self) -> Any:
        return RandomBatches(self.meshes.dp_rank)

    def build_evaluation(self) -> Any:
        return samples()

    def build_model(self) -> torch.nn.Module:
        return build_model()


def make_trainer(case: Case) -> SampleTrainer:
    platform = current_platform("cpu")
    return SampleTrainer(config_of(case), platform, platform.device(0))


# --- against one process --------------------------------------------------------------------------------------------


def oracle() -> dict[str, Any]:
    """Return what a person would work out on one device without any of this."""
    rows = samples()
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = build_model().eval()(input_ids=ids).logits
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(
        ids.shape
    )
    valid = int((targets != -100).sum())
    return {"logits": logits, "targets": targets, "losses": losses, "valid": valid, "mean": float(losses.sum()) / valid}


def evaluated(case: Case) -> EvalResult:
    return make_trainer(case).evaluate()


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_loss_of_an_evaluation_is_that_of_one_process(worlds: Any, case: Case) -> None:
    expected = oracle()
    for found in worlds(case.world_size).run(evaluated, case):
        assert found.loss == pytest.approx(expected["mean"], rel=1e-12)
        assert (found.valid_tokens, found.samples) == (expected["valid"], NUM_SAMPLES)


def predicted(case: Case) -> dict[str, list[Prediction]]:
    trainer, rows = make_trainer(case), samples()
    batches = [
        {name: torch.stack([row[name] for row in part]) for name in rows[0]} for part in (rows[:5], rows[5:6], rows[6:])
    ]
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in batches]
    return {
        "all": trainer.predict(batches, logits=True),
        "default": trainer.predict(batches),
        "unlabelled": trainer.predict(unlabelled),
    }


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_predictions_are_those_of_one_process_in_global_order_on_rank_0(worlds: Any, case: Case) -> None:
    first, *others = worlds(case.world_size).run(predicted, case)
    assert all(not predictions for other in others for predictions in other.values())
    expected = oracle()
    for kind, predictions in first.items():
        assert torch.equal(torch.stack([one.ids for one in predictions]), expected["logits"].argmax(-1))
        if kind == "all":
            assert torch.dist(torch.stack([one.logits for one in predictions]), expected["logits"]) < 1e-10
        else:
            assert all(one.logits is None for one in predictions)
        if kind == "unlabelled":
            assert all(one.shift_labels is None and one.label_log_probs is None for one in predictions)
        else:
            assert torch.equal(torch.stack([one.shift_labels for one in predictions]), expected["targets"])
            assert torch.dist(torch.stack([one.label_log_probs for one in predictions]), -expected["losses"]) < 1e-10


def weighted(case: Case) -> EvalResult:
    rows = [{**row, "loss_weights": torch.arange(1.0, SEQ_LENGTH + 1)} for row in samples()]
    return make_trainer(case).evaluate(rows)


def test_samples_with_weights_give_the_weighted_mean(worlds: Any) -> None:
    expected = oracle()
    weights = torch.arange(2.0, SEQ_LENGTH + 2).expand_as(expected["losses"])  # of the label that a token predicts
    mean = float((expected["losses"] * weights).sum() / weights[expected["targets"] != -100].sum())
    for found in worlds(4).run(weighted, Case(dp=2, cp=2)):
        assert found.loss == pytest.approx(mean, rel=1e-12)
        assert found.valid_tokens == expected["valid"]


# --- training goes on -----------------------------------------------------------------------------------------------


class NoisyTrainer(SampleTrainer):
    """Its model drops out in training, draws random numbers in every forward, and has a module that stays in eval."""

    def build_model(self) -> torch.nn.Module:
        model: Any = build_model()
        embedding = model.model.embed_tokens

        def disturb(module: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            random.random(), np.random.random()
            noisy = output * (1 + 0.1 * torch.rand(output.shape[0], 1, 1, dtype=output.dtype))
            return torch.nn.functional.dropout(noisy, 0.2, training=module.training)

        embedding.register_forward_hook(disturb)
        return model


def four_steps(case: Case, looks: bool) -> dict[str, Any]:
    platform = current_platform("cpu")
    trainer = NoisyTrainer(config_of(case), platform, platform.device(0))
    frozen = trainer.model.get_submodule("model.norm").eval()
    random.seed(3), np.random.seed(3)
    losses = []
    if looks:
        trainer.evaluate()
    for _ in range(4):
        window = trainer.next_window()
        losses.append(trainer.accumulate(window).item())
        if looks:  # with gradients that wait for the optimizer
            trainer.predict([{name: rows.unsqueeze(0) for name, rows in samples()[0].items()}])
            trainer.evaluate()
        trainer.reduce_gradients()
        trainer.clip_gradients()
        trainer.update()
    modes = {name: module.training for name, module in trainer.model.named_modules()}
    return {
        "losses": losses,
        "bits": [whole(param).numpy().tobytes() for param in trainer.model.parameters()],
        "shards": [isinstance(param, DTensor) for param in trainer.model.parameters()],
        "eval": [name for name, training in modes.items() if not training],
        "random": (torch.rand(2).tolist(), random.random(), float(np.random.random())),
        "frozen": frozen.training,
    }


def whole(param: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = param.full_tensor() if isinstance(param, DTensor) else param
    return full.detach()


TRAINED = {name: CASES[name] for name in ("dp2-cp2", "cp2-fsdp", "dp2-cp2-hsdp", "cp2-recomputed")}


@pytest.mark.parametrize("case", TRAINED.values(), ids=TRAINED.keys())
def test_steps_with_evaluations_between_are_those_without_to_the_bit(worlds: Any, case: Case) -> None:
    expected = worlds(case.world_size).run(four_steps, case, False)
    assert worlds(case.world_size).run(four_steps, case, True) == expected
    assert expected[0]["eval"] == ["model.norm"]


def parameters_after_an_evaluation(case: Case) -> list[bool]:
    trainer = make_trainer(case)
    trainer.evaluate()
    return [isinstance(param, DTensor) for param in trainer.model.parameters()]


def test_parameters_are_shards_again_after_an_evaluation(worlds: Any) -> None:
    for found in worlds(2).run(parameters_after_an_evaluation, CASES["cp2-fsdp"]):
        assert all(found)


class ExpertTrainer(SampleTrainer):
    """Its model has a loss that balances experts."""

    def build_model(self) -> torch.nn.Module:
        model: torch.nn.Module = HyperAutoModel.build(self.config.model)
        return model


EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


def steps_of_experts(looks: bool) -> tuple[list[float], list[EvalResult]]:
    changes = {"model": {"config": {**FIELDS, **EXPERTS, "router_aux_loss_coef": 1.0}}}
    platform = current_platform("cpu")
    trainer = ExpertTrainer(config_of(Case(cp=dist.get_world_size(), changes=changes)), platform, platform.device(0))
    losses, found = [], []
    for _ in range(2):
        losses.append(float(trainer.train_step().loss))
        if looks:
            found.append(trainer.evaluate())
            trainer.predict([{"input_ids": samples()[0]["input_ids"].unsqueeze(0)}])
            assert trainer.expert_balance is not None
            assert trainer.expert_balance._recorded is None
    return losses, found


def test_an_evaluation_leaves_the_balance_of_experts_alone(worlds: Any) -> None:
    alone = worlds(1).run(steps_of_experts, True)[0][1]
    expected = worlds(2).run(steps_of_experts, False)
    for (losses, found), (undisturbed, _) in zip(worlds(2).run(steps_of_experts, True), expected, strict=True):
        assert losses == undisturbed
        assert [one.loss for one in found] == pytest.approx([one.loss for one in alone], rel=1e-9)


# --- what is refused ------------------------------------------------------------------------------------------------


def other_samples_on_rank_1(case: Case, change: str) -> None:
    trainer, rows, changed = make_trainer(case), samples(), dist.get_rank() == 1
    if change == "number":
        trainer.evaluate(rows[:5] if changed else rows)
    elif change == "first":
        trainer.evaluate(rows[::-1] if changed else rows)
    else:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        trainer.predict([batch] * (3 if changed else 2))


DIFFERENT = {
    "number": "rank 1 has 5 and rank 0 has 7, or their first ones differ",
    "first": "rank 1 has 7 and rank 0 has 7, or their first ones differ",
    "batches": "after as many as others had, ranks 1 have more",
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_ranks_with_other_samples_are_refused_on_all_ranks(worlds: Any, change: str) -> None:
    with pytest.raises(RankFailed, match=DIFFERENT[change]):
        worlds(2).run(other_samples_on_rank_1, Case(dp=2), change)


def refusals(case: Case) -> list[str]:
    trainer, rows, said = make_trainer(case), samples(), []
    unweighted = [dict(row) for row in rows]
    unweighted[0]["loss_weights"] = unweighted[1]["loss_weights"] = torch.ones(SEQ_LENGTH)
    for given in (rows[1:2], [{"input_ids": row["input_ids"]} for row in rows], unweighted):
        with pytest.raises(ValueError) as caught:
            trainer.evaluate(given)
        said.append(str(caught.value))
    trainer.evaluation_samples = None
    with pytest.raises(ValueError) as caught:
        trainer.evaluate()
    return [*said, str(caught.value)]


def test_an_evaluation_of_nothing_is_refused(worlds: Any) -> None:
    for no_label, no_labels, mixed, nothing in worlds(2).run(refusals, Case(cp=2)):
        assert no_label.startswith("none of the 1 samples to evaluate has a label that weighs anything")
        assert no_labels == "samples to evaluate need labels, but they have only input_ids."
        assert mixed.startswith("loss_weights must be given for all samples or for none, but 6 of 8 forwards have none")
        assert nothing.startswith("there is nothing to evaluate: give evaluate() samples")
