"""Evaluation and prediction in the middle of a training.

B rows of a forward on one rank, S global length of a sample, L of its shard, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Subset

from cp_collectives import gather_objects, gather_objects_to_first, mesh_rank
from cp_core import InvalidInputError, SequenceLayout, count_valid_tokens, unshard_sequence

from ._config import TrainerConfig
from ._data import Batch, ShardOnDevice
from ._loss import token_log_probs
from ._mesh import MeshContext
from ._samples import Samples, Share, agreed_batches, shares_of
from ._undisturbed import undisturbed


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """What an evaluation found; equal on all ranks, and at any number of them but for rounding."""

    # Mean over the valid tokens of all samples, by their weights where they have some.
    loss: float
    valid_tokens: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """What the model says of one sample, in the order of its tokens; on the host."""

    # [S] int64: the likeliest next token after each.
    ids: torch.Tensor
    # [S] int64: the next token that the labels name, -100 where they name none; None without labels.
    shift_labels: torch.Tensor | None = None
    # [S] in fp32 or wider: the log-probability of `shift_labels`, 0 where that is -100; None without labels.
    label_log_probs: torch.Tensor | None = None
    # [S, V], if asked for.
    logits: torch.Tensor | None = None


class LossPart(NamedTuple):
    """What this rank found in one forward."""

    # 0-d, on the device.
    loss_sum: torch.Tensor
    valid_tokens: int
    # None where each label weighs 1.
    weight_sum: float | None


class Forwards(Protocol):
    """What a trainer brings to an evaluation; `BaseTrainer` says what each is."""

    config: TrainerConfig
    meshes: MeshContext
    model: torch.nn.Module
    evaluation_samples: Samples | None

    def shard_batch(self, batch: Batch) -> dict[str, Any]: ...

    def on_device(self, shard: dict[str, Any]) -> ShardOnDevice: ...

    def compute_logits(self, inputs: dict[str, Any]) -> torch.Tensor: ...

    def compute_loss_sum(
        self, inputs: dict[str, Any], shift_labels: torch.Tensor, *, loss_weights: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def loss_weight_sum(self, shift_labels: torch.Tensor, loss_weights: torch.Tensor | None) -> float | None: ...


def evaluates_after(step: int, config: TrainerConfig) -> bool:
    """Whether a run makes an evaluation after a step."""
    section = config.evaluation
    if section is None:
        return False
    return step == config.training.train_iters or (section.every_iters > 0 and step % section.every_iters == 0)


def evaluate(trainer: Forwards, samples: Samples | None) -> EvalResult:
    """Do what `BaseTrainer.evaluate` says."""
    chosen = _configured_samples(trainer) if samples is None else samples
    rows, meshes = trainer.config.training.micro_batch_size, trainer.meshes
    with undisturbed(trainer.model, meshes.device, where="an evaluation"):
        parts = [_loss_part(trainer, share) for share in shares_of(chosen, rows=rows, meshes=meshes)]
    return _mean_loss(parts, num_samples=len(chosen), dp_cp_mesh=meshes.dp_cp_mesh)


def predict(trainer: Forwards, batches: Iterable[Batch], *, logits: bool) -> list[Prediction]:
    """Do what `BaseTrainer.predict` says."""
    meshes, predictions = trainer.meshes, list[Prediction]()
    with undisturbed(trainer.model, meshes.device, where="a prediction"):
        for samples in agreed_batches(batches, mesh=meshes.world_mesh):
            for share in shares_of(samples, rows=trainer.config.training.micro_batch_size, meshes=meshes):
                own = list(_predictions(trainer, share, with_logits=logits))
                # Data-parallel ranks stand in the order of their samples, and all but the first rank of each send none.
                parts = gather_objects_to_first(own, mesh=meshes.dp_cp_mesh)
                predictions += [prediction for part in parts for prediction in part]
    return predictions


def _configured_samples(trainer: Forwards) -> Samples:
    samples, section = trainer.evaluation_samples, trainer.config.evaluation
    if samples is None:
        raise InvalidInputError(
            "there is nothing to evaluate: give evaluate() samples, or the config a section evaluation and the trainer "
            "a build_evaluation."
        )
    if section is None or section.max_samples is None:
        return samples
    return Subset(samples, range(min(section.max_samples, len(samples))))  # type: ignore[arg-type]  # needs no Dataset


def _loss_part(trainer: Forwards, share: Share) -> LossPart:
    shard = trainer.shard_batch(share.batch)
    inputs, shift_labels, weights = trainer.on_device(shard)
    if shift_labels is None:
        raise InvalidInputError(f"samples to evaluate need labels, but they have only {', '.join(share.batch)}.")
    return LossPart(
        trainer.compute_loss_sum(inputs, shift_labels, **weights),
        count_valid_tokens(shard["shift_labels"]),
        trainer.loss_weight_sum(shard["shift_labels"], shard.get("loss_weights")),
    )


def _mean_loss(parts: Sequence[LossPart], *, num_samples: int, dp_cp_mesh: DeviceMesh | None) -> EvalResult:
    """Return the mean over all forwards of all ranks, summed in float64 and in an order that no rank chooses."""
    sums = torch.stack([part.loss_sum for part in parts]).cpu().tolist()  # the first time that the host waits
    own = [(total, part.valid_tokens, part.weight_sum) for total, part in zip(sums, parts, strict=True)]
    everyone = [part for parts_of_rank in gather_objects(own, mesh=dp_cp_mesh) for part in parts_of_rank]
    loss_sums, counts, weights = zip(*everyone, strict=True)
    valid_tokens = sum(counts)
    denominator = _denominator(weights, valid_tokens)
    if denominator == 0:
        raise InvalidInputError(
            f"none of the {num_samples} samples to evaluate has a label that weighs anything, so there is no mean "
            "loss; set labels other than -100 where the loss is to count."
        )
    return EvalResult(loss=math.fsum(loss_sums) / denominator, valid_tokens=valid_tokens, samples=num_samples)


def _denominator(weights: Sequence[float | None], valid_tokens: int) -> float:
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise InvalidInputError(
            f"loss_weights must be given for all samples or for none, but {len(weights) - len(given)} of "
            f"{len(weights)} forwards have none."
        )
    return math.fsum(given) if given else valid_tokens


def _predictions(trainer: Forwards, share: Share, *, with_logits: bool) -> Iterator[Prediction]:
    """Yield the samples of a share on the first of the ranks that forward it, and nothing on the others."""
    shard = trainer.shard_batch(share.batch)
    inputs, shift_labels, _ = trainer.on_device(shard)
    logits = trainer.compute_logits(inputs)
    local = {"ids": logits.argmax(dim=-1)}
    if shift_labels is not None:
        local |= {"shift_labels": shift_labels, "label_log_probs": token_log_probs(logits, shift_labels)}
    cp_mesh, layout = trainer.meshes.cp_mesh, shard["cp_layout"]
    whole = {name: _whole(value, cp_mesh, layout) for name, value in local.items()}
    sends = mesh_rank(trainer.meshes.same_data_mesh) == 0
    for row in range(share.num_real):
        entries = {name: value[row].clone() for name, value in whole.items()}  # else all rows travel with each
        if with_logits:
            entries["logits"] = _whole(logits[row : row + 1], cp_mesh, layout)[0]
        if sends:
            yield Prediction(**entries)


def _whole(value: torch.Tensor, cp_mesh: DeviceMesh, layout: SequenceLayout) -> torch.Tensor:
    """Return a shard `[B, L, ...]` in global order without pads, `[B, S, ...]`, on the host."""
    return unshard_sequence(value, 1, cp_mesh, layout).cpu()
