"""`verify` says of right set-ups that they are right, and of each planted fault where it shows and what it is.

Trainers read random tokens with labels at uneven places; faults are planted as a user would make them.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import cp_core._strategy
from cp_collectives import current_platform
from cp_collectives.testing import RankFailed
from cp_core import count_valid_tokens, local_attention, sum_gradients
from cp_trainer_glue import TextTrainer, TrainerConfig, VerifyOptions, VerifyReport, verify_training

VOCAB_SIZE = 96
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,
    "pad_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
WRAPPED = {
    "match": "*.self_attn",
    "when": "cp",
    "region_dispatch": False,
    "inner_target": "self",
    "inner_wrapper": "sdpa_hf",
}


def make_config(family: str = "llama", **changes: Any) -> TrainerConfig:
    """Return a config for two context-parallel ranks, with `section__key=value` changes."""
    content: dict[str, Any] = {
        "output_dir": "runs/never_written",
        "model": {"config": {"model_type": family, **SIZES}},
        "data": {"source": "stdlib", "seq_length": 30},
        "training": {"train_iters": 10, "global_batch_size": 2, "micro_batch_size": 2, "max_grad_norm": 0.5},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "lr_scheduler": {"name": "cosine", "warmup_iters": 5},
        "accelerator": {"cp_size": 2},
        "plan_overrides": [WRAPPED],
    }
    for place, value in changes.items():
        *parents, last = place.split("__")
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return TrainerConfig.model_validate(content)


class Samples:
    """Micro-batches of random tokens in which every sample has labels at other places, and another number of them."""

    def __init__(self, config: TrainerConfig, dp_rank: int, padding: str) -> None:
        self._config, self._dp_rank, self._padding = config, dp_rank, padding

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        size, length = self._config.training.micro_batch_size, self._config.data.seq_length
        for number in itertools.count():
            generator = torch.Generator().manual_seed(1000 * number + self._dp_rank)
            ids = torch.randint(VOCAB_SIZE, (size, length), generator=generator)
            chance = torch.rand((size, 1), generator=generator)
            labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > chance, -100)
            labels[:, length // 2] = ids[:, length // 2]  # a target at the end of the first half
            yield {"input_ids": ids, "labels": labels} | self._padded(ids, labels)

    def _padded(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._padding == "none":
            return {}
        index = torch.arange(ids.shape[1]).expand(ids.shape)
        real = index < ids.shape[1] - 5 if self._padding == "right" else index >= 5
        return {"attention_mask": real.long(), "labels": labels.masked_fill(~real, -100)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SampleTrainer(TextTrainer):
    """A right trainer."""

    padding = "none"

    def build_data(self) -> Any:
        give_tokenizer(self)
        return Samples(self.config, self.meshes.dp_rank, self.padding)


class RightPadded(SampleTrainer):
    padding = "right"


class LeftPadded(SampleTrainer):
    padding = "left"


class TokensWeighted(SampleTrainer):
    """Weighs each token's loss."""

    def build_data(self) -> Any:
        return _WithWeights(super().build_data())


class _WithWeights:
    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.state_dict, self.load_state_dict = samples.state_dict, samples.load_state_dict

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self._samples:
            generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
            weights = torch.rand(batch["input_ids"].shape, generator=generator, dtype=torch.float64)
            yield {**batch, "loss_weights": weights}


def give_tokenizer(trainer: TextTrainer) -> None:
    """Give a trainer a tokenizer that asks for no vocabulary: the tokens are random."""

    class Nothing:
        vocab_size = 1

    trainer.tokenizer = Nothing()  # type: ignore[assignment]


def verified(trainer_class: type[TextTrainer], config: TrainerConfig, **options: Any) -> VerifyReport:
    platform = current_platform("cpu")
    return verify_training(trainer_class, config, platform, platform.device(0), options=VerifyOptions(**options))


# --- right set-ups ------------------------------------------------------------------------------------------------

MOE = {"model__config": {"model_type": "qwen3_moe", **SIZES, **EXPERTS}}
DP_CP = {"accelerator__dp_replicate_size": 2, "training__micro_batch_size": 1}
THREE = {"training__global_batch_size": 3, "training__micro_batch_size": 1}
REGATHERED = {"_target_": "sdpa_hf", "backward_kv": "regathered"}


class Right(NamedTuple):
    trainer: type[TextTrainer] = SampleTrainer
    family: str = "llama"
    changes: Mapping[str, Any] = MappingProxyType({})
    world_size: int = 2


# Beside the files of test_verified_files.py: what only another stream of batches has, and more.
RIGHT = {
    "labels at uneven places": Right(),
    "S not divisible": Right(family="qwen3", changes={"data__seq_length": 29}),
    "window of three, one sample each": Right(changes=THREE),
    "norms in fp32": Right(family="gemma"),
    "regathered": Right(family="qwen3", changes={"plan_overrides": [{**WRAPPED, "inner_wrapper": REGATHERED}]}),
    "pads after": Right(RightPadded),
    "pads before": Right(LeftPadded),
    "token weights": Right(TokensWeighted),
    "token weights and class weights, dp 2 x cp 2": Right(
        TokensWeighted, changes={**DP_CP, "loss": {"class_weights": {3: 5.0}}}, world_size=4
    ),
    "data parallel only": Right(
        changes={"accelerator": {"dp_replicate_size": 2}, "training__micro_batch_size": 1},
    ),
    "dp 2 x cp 2, window of three": Right(changes={**DP_CP, "training__global_batch_size": 6}, world_size=4),
    "cp 2 x tp 2": Right(family="qwen3", changes={"accelerator__tp_size": 2}, world_size=4),
}


def verify_right(name: str) -> dict[str, Any]:
    right = RIGHT[name]
    return verified(right.trainer, make_config(right.family, **right.changes)).as_json()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_set_up_is_found_right(worlds: Any, name: str) -> None:
    for report in worlds(RIGHT[name].world_size).run(verify_right, name):
        assert [check for check in report["checks"] if not check["passed"]] == []
        assert report["passed"]
        assert report["causes"] == []
        assert {check["step"] for check in report["checks"]} == {1, 2}
        kinds = {check["kind"] for check in report["checks"]}
        assert {"layer", "logits", "labels", "loss", "gradient", "clipped_gradient", "parameter", "replicas"} <= kinds


# --- planted faults -----------------------------------------------------------------------------------------------


class UnlikeRowsAndExperts(SampleTrainer):
    """Data-parallel ranks have other numbers of tokens, and experts are balanced over all of them."""

    def build_data(self) -> Any:
        super().build_data()
        config = self.config
        length = config.data.seq_length - 2 * self.meshes.dp_rank
        shorter = config.model_copy(update={"data": config.data.model_copy(update={"seq_length": length})})
        return Samples(shorter, self.meshes.dp_rank, self.padding)


def verify_unlike_rows() -> None:
    verified(UnlikeRowsAndExperts, make_config("qwen3_moe", **BALANCED, **DP_CP))


def test_what_one_device_cannot_compute_stops_all_ranks_with_its_words(worlds: Any) -> None:
    with pytest.raises(RankFailed, match="verify computes the auxiliary loss of all data-parallel ranks") as failed:
        worlds(4).run(verify_unlike_rows)
    assert all(f"rank {rank} failed" in str(failed.value) for rank in range(4))


class SameDataOnDpRanks(SampleTrainer):
    def build_data(self) -> Any:
        super().build_data()
        return Samples(self.config, 0, self.padding)


class LabelsShiftedOnShard(SampleTrainer):
    def next_window(self) -> Any:
        window = super().next_window()
        for batch in window.batches:
            own = batch["shift_labels"].roll(1, dims=1)  # not the labels, but what counts is what is lost at the end
            batch["shift_labels"] = torch.nn.functional.pad(own[:, 1:], (0, 1), value=-100)
        return window


class LabelsShiftedInLoss(SampleTrainer):
    """Shifts by itself, where a rank's shard is all that it sees."""

    def compute_loss_sum(self, inputs: dict[str, Any], shift_labels: torch.Tensor) -> torch.Tensor:
        cut = shift_labels.clone()
        cut[:, -1] = -100
        return super().compute_loss_sum(inputs, cut)


class PositionsFromZero(SampleTrainer):
    def compute_loss_sum(self, inputs: dict[str, Any], shift_labels: torch.Tensor) -> torch.Tensor:
        positions = inputs["position_ids"]
        return super().compute_loss_sum({**inputs, "position_ids": positions - positions[:, :1]}, shift_labels)


class PositionsRemadeByTheModel(SampleTrainer):
    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        rotary = model.model.rotary_emb
        model.model.rotary_emb = RotaryFromZero(rotary)
        return model


class RotaryFromZero(torch.nn.Module):
    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(x, position_ids - position_ids[:, :1])


class LayerUnwrapped(SampleTrainer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        attention = self.model.model.layers[1].self_attn
        attention._context_parallel.intercepted = False
        attention.__dict__.pop("forward")


class GradientTimesCp(SampleTrainer):
    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for parameter in self.model.parameters():
            parameter.grad *= self.config.accelerator.cp_size


class OwnArithmetic(SampleTrainer):
    """Computes its loss in its own way, as many loops do."""

    def accumulate(self, window: Any) -> torch.Tensor:
        logged = torch.zeros(())
        for batch in window.batches:
            local = dict(batch)
            shift_labels = local.pop("shift_labels")
            loss = self.compute_loss_sum(local, shift_labels) / self.denominator(
                window, count_valid_tokens(shift_labels)
            )
            loss.backward()
            logged = logged + loss.detach()
        dist.all_reduce(logged, group=self.meshes.dp_cp_mesh.get_group())
        return logged

    def denominator(self, window: Any, num_labels: int) -> float:
        raise NotImplementedError


class LossAveragedPerRank(OwnArithmetic):
    def denominator(self, window: Any, num_labels: int) -> float:
        return max(sum(window.counts), 1) * self.meshes.dp_cp_mesh.size()


class LossAveragedPerMicroBatch(OwnArithmetic):
    def denominator(self, window: Any, num_labels: int) -> float:
        counts = [None] * self.meshes.dp_cp_mesh.size()
        dist.all_gather_object(counts, num_labels, group=self.meshes.dp_cp_mesh.get_group())
        return sum(counts) * len(window.batches)


class TokensCountedOverDpOnly(OwnArithmetic):
    def next_window(self) -> Any:
        window = super().next_window()
        mesh = self.meshes.device_mesh["dp_replicate"]
        counts = [None] * mesh.size()
        dist.all_gather_object(counts, sum(window.counts), group=mesh.get_group())
        return dataclasses.replace(window, valid_tokens=sum(counts))

    def denominator(self, window: Any, num_labels: int) -> float:
        return window.valid_tokens


class LoggedLossIsLocal(SampleTrainer):
    def accumulate(self, window: Any) -> torch.Tensor:
        return super().accumulate(window) * self.config.accelerator.cp_size


class NormOfOwnShard(SampleTrainer):
    def clip_gradients(self) -> torch.Tensor:
        local = [parameter.grad.to_local() for parameter in self.model.parameters()]
        norm = torch.stack([gradient.norm() for gradient in local]).norm()
        for gradient in local:
            gradient.mul_((self.config.training.max_grad_norm / norm).clamp(max=1))
        return norm


class NormBeforeReduction(SampleTrainer):
    def reduce_gradients(self) -> None:
        grads = [parameter.grad for parameter in self.model.parameters()]
        self.norm = torch.stack([gradient.norm() for gradient in grads]).norm()
        super().reduce_gradients()

    def clip_gradients(self) -> torch.Tensor:
        for parameter in self.model.parameters():
            parameter.grad.mul_((self.config.training.max_grad_norm / self.norm).clamp(max=1))
        return self.norm


class ExtraParameterNotSummed(SampleTrainer):
    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model.gain = torch.nn.Parameter(torch.ones(()))
        return model

    def compute_loss_sum(self, inputs: dict[str, Any], shift_labels: torch.Tensor) -> torch.Tensor:
        return self.model.gain * super().compute_loss_sum(inputs, shift_labels)

    def reduce_gradients(self) -> None:
        sum_gradients([p for n, p in self.model.named_parameters() if n != "gain"], self.meshes.dp_cp_mesh)


class ParameterAddedLater(SampleTrainer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.model.late = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.optimizer.param_groups[0]["params"].append(self.model.late)

    def compute_loss_sum(self, inputs: dict[str, Any], shift_labels: torch.Tensor) -> torch.Tensor:
        gain = getattr(self.model, "late", 1.0)
        return gain * super().compute_loss_sum(inputs, shift_labels)


class ParameterBesideTheModel(SampleTrainer):
    """Trains a parameter of its own that no one synchronises."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gain = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.optimizer.param_groups[0]["params"].append(self.gain)

    def compute_loss_sum(self, inputs: dict[str, Any], shift_labels: torch.Tensor) -> torch.Tensor:
        return self.gain * super().compute_loss_sum(inputs, shift_labels)


class NoTpAllReduce(SampleTrainer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gradients._tp_grad_info = {}


class GradientsNotSummedOverDp(SampleTrainer):
    def reduce_gradients(self) -> None:
        sum_gradients(self.model.parameters(), self.meshes.cp_mesh)


class OnlyTheFirstRanksGradient(SampleTrainer):
    def reduce_gradients(self) -> None:
        for parameter in self.model.parameters():
            dist.broadcast(parameter.grad, src=0)


class LastMicroBatchOnly(SampleTrainer):
    def accumulate(self, window: Any) -> torch.Tensor:
        logged = torch.zeros(())
        for index in range(len(window.batches)):
            for parameter in self.model.parameters():
                parameter.grad = None
            logged = logged + self._backward(window, index)
        return logged


class ExpertsBalancedPerRank(SampleTrainer):
    def compute_auxiliary_loss(self, layout: Any, *, batch_size: int, dp_cp_mesh: Any) -> Any:
        part = super().compute_auxiliary_loss(layout, batch_size=batch_size, dp_cp_mesh=None)
        return part if dp_cp_mesh is None else part / dp_cp_mesh.size()


def top_left_attention(q: Any, k: Any, v: Any, *, attention_meta: Any, recall: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=attention_meta.scale, enable_gqa=True
    )


def unmasked_attention(q: Any, k: Any, v: Any, *, attention_meta: Any, recall: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=attention_meta.scale, enable_gqa=True)


def attention_without_window(q: Any, k: Any, v: Any, *, attention_meta: Any, recall: Any) -> torch.Tensor:
    return local_attention(q, k, v, attention_meta=dataclasses.replace(attention_meta, window=None), recall=recall)


KERNELS = {
    "causal aligned top-left": top_left_attention,
    "causal mask dropped": unmasked_attention,
    "window dropped": attention_without_window,
}
BALANCED = {"model__config": {**MOE["model__config"], "output_router_logits": True, "router_aux_loss_coef": 0.1}}
MISTRAL = {"model__config": {"model_type": "mistral", **SIZES, "sliding_window": 5}}


class Fault(NamedTuple):
    trainer: type[TextTrainer]
    # The causes that must be named, in order.
    causes: list[str]
    family: str = "llama"
    changes: Mapping[str, Any] = MappingProxyType({})
    world_size: int = 2


FAULTS = {
    "the same data on dp ranks": Fault(SameDataOnDpRanks, ["data_read_twice"], changes=DP_CP, world_size=4),
    "label shift on the shard": Fault(LabelsShiftedOnShard, ["labels_shifted_per_rank"]),
    "label shift inside the loss": Fault(LabelsShiftedInLoss, ["labels_shifted_per_rank"]),
    "positions from 0": Fault(PositionsFromZero, ["positions_restart"]),
    "positions from 0, pads": Fault(PositionsFromZero, ["positions_restart"], changes={"data__seq_length": 29}),
    "positions remade by the model": Fault(PositionsRemadeByTheModel, ["positions_restart"]),
    "one layer left unwrapped": Fault(LayerUnwrapped, ["attention_local"]),
    "causal aligned top-left": Fault(SampleTrainer, ["mask_top_left"]),
    "causal mask dropped": Fault(SampleTrainer, ["mask_dropped"], changes={"data__seq_length": 29}),
    "window dropped": Fault(SampleTrainer, ["window_dropped"], "mistral", MISTRAL),
    "gradient times cp_size": Fault(GradientTimesCp, ["gradient_scaled"]),
    "gradient times cp_size, norms in fp32": Fault(GradientTimesCp, ["gradient_scaled"], "gemma"),
    "loss averaged per rank": Fault(LossAveragedPerRank, ["mean_per_rank"]),
    "loss averaged per micro-batch": Fault(LossAveragedPerMicroBatch, ["mean_per_micro_batch"], changes=THREE),
    "tokens counted over dp only": Fault(TokensCountedOverDpOnly, ["tokens_over_dp_only"], changes=DP_CP, world_size=4),
    "logged loss times cp_size": Fault(LoggedLossIsLocal, ["loss_scaled"]),
    "clip norm per shard": Fault(NormOfOwnShard, ["norm_per_shard"], changes={"fsdp": {}}),
    "clip norm before the sum": Fault(NormBeforeReduction, ["norm_before_reduction"]),
    "unsynchronised extra parameter": Fault(ExtraParameterNotSummed, ["gradients_not_synchronised"]),
    "parameter added later": Fault(ParameterAddedLater, ["one_sided_parameter"]),
    "parameter beside the model": Fault(ParameterBesideTheModel, ["optimizer_of_other_parameters"]),
    "missing TP all-reduce of norms": Fault(
        NoTpAllReduce, ["missing_tp_all_reduce"], "qwen3", {"accelerator": {"tp_size": 2}}
    ),
    "gradients not summed over dp": Fault(
        GradientsNotSummedOverDp, ["gradients_not_synchronised"], changes=DP_CP, world_size=4
    ),
    "only the first rank's gradient": Fault(OnlyTheFirstRanksGradient, ["part_of_cp_rank"]),
    "experts balanced per rank": Fault(ExpertsBalancedPerRank, [], "qwen3_moe", BALANCED),
    "only the last micro-batch": Fault(LastMicroBatchOnly, ["part_of_micro_batch"], changes=THREE),
}


def verify_fault(name: str) -> dict[str, Any]:
    fault = FAULTS[name]
    kernel = KERNELS.get(name, cp_core._strategy.local_attention)
    with mock.patch.object(cp_core._strategy, "local_attention", kernel):
        return verified(fault.trainer, make_config(fault.family, **fault.changes)).as_json()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(worlds: Any, name: str) -> None:
    for report in worlds(FAULTS[name].world_size).run(verify_fault, name):
        assert not report["passed"]
        print(*[f"{cause['kind']}: {cause['sentence']} [{cause['evidence']}]" for cause in report["causes"]], sep="\n")
        print(report["first_layer"], report["first_parameter"], report["first_token"])
        assert [cause["kind"] for cause in report["causes"]] == FAULTS[name].causes
