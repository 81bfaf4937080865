"""One device: the model as it was built, the whole batch, and a loop of plain torch.

It shares with the trainer only what is the user's: the model, the batches and the hooks of the loss.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cp_core import InvalidInputError, SequenceLayout

from .._trainer import BaseTrainer
from ._batches import IGNORED, GlobalBatch, joined
from ._capture import LOGITS, LayerCapture
from ._narrow import used_in_fp32

Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceStep:
    """One optimizer step on one device; tensors on the host."""

    loss: float
    valid_tokens: int
    # What the loss sums are divided by: the labels, or the sum of their weights.
    denominator: float
    grad_norm: float
    gradients: Gradients
    clipped: Gradients
    parameters: dict[str, torch.Tensor]
    # By data-parallel rank and micro-batch, by module, `[B, S, ...]`.
    outputs: dict[tuple[int, int], dict[str, torch.Tensor]]
    # Parameters of which the model casts float64 to fp32, so that their gradient is rounded as it is summed.
    used_in_fp32: frozenset[str] = frozenset()


class MicroStepRows(NamedTuple):
    """A micro-batch of all data-parallel ranks: one batch of all their rows where they fit together, else one each."""

    batches: list[GlobalBatch]
    # What the rows were, in order.
    parts: list[GlobalBatch]
    num_micro_steps: int

    @classmethod
    def of(cls, parts: list[GlobalBatch], *, num_micro_steps: int) -> "MicroStepRows":
        """Put the batches of all data-parallel ranks together."""
        whole = joined(parts)
        return cls(parts if whole is None else [whole], parts, num_micro_steps)

    def split(
        self, batch: GlobalBatch, outputs: Mapping[str, torch.Tensor]
    ) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
        """Return the outputs `[rows, S, ...]` of one batch by data-parallel rank and micro-batch."""
        parts = self.parts if len(self.batches) == 1 else [batch]
        sizes = [len(part.real) for part in parts]
        found: dict[tuple[int, int], dict[str, torch.Tensor]] = {(p.dp_rank, p.micro_batch): {} for p in parts}
        for name, output in outputs.items():
            if len(output) == sum(sizes):
                for part, own in zip(parts, output.split(sizes), strict=True):
                    found[part.dp_rank, part.micro_batch][name] = own
        return found


class PartialLoss(NamedTuple):
    """The loss sum of some labels and its gradients."""

    loss_sum: float
    gradients: dict[str, torch.Tensor]


class Reference:
    """Trains the unwrapped model.

    Args:
        trainer: The declared run's trainer, for its hooks alone.
        trainer_class: The user's class, whose hooks of the loss are called.
        model: The model before anything was applied to it; trained in place.
        learning_rate: Of SGD.
    """

    def __init__(
        self, trainer: BaseTrainer, trainer_class: type[BaseTrainer], model: torch.nn.Module, *, learning_rate: float
    ) -> None:
        self.model, self.device = model.to(trainer.meshes.device).train(), trainer.meshes.device
        self._trainer_class, self._learning_rate = trainer_class, learning_rate
        self._max_norm = trainer.config.training.max_grad_norm
        # A loss that is made in chunks leaves none to compare; the loss of one device is made whole.
        self._compares_logits = trainer.config.loss.chunk_tokens is None
        # The user's hooks see their trainer with this model in the place of the wrapped one.
        self._view = copy.copy(trainer)
        self._view.model = self.model
        self._view.config = _on_one_device(trainer.config)
        trainer_class.prepare_loss(self._view)
        self._before: dict[str, torch.Tensor] = {}

    def step(self, batches: Sequence[GlobalBatch]) -> ReferenceStep:
        """Make one step over the micro-batches of all data-parallel ranks."""
        named = dict(self.model.named_parameters())
        self._before = {name: p.detach().clone() for name, p in named.items()}
        trainable = [p for p in named.values() if p.requires_grad]
        denominator = sum(self.weight_of(batch, batch.shift_labels) for batch in batches) or 1.0
        loss, outputs = 0.0, dict[tuple[int, int], dict[str, torch.Tensor]]()
        narrow: set[str] = set()
        with LayerCapture(self.model) as capture:
            for rows in _micro_steps(batches):
                for batch in rows.batches:
                    capture.begin()
                    part = self.loss_of(batch) / denominator + self._auxiliary_loss(batch, rows)
                    if part.requires_grad:
                        narrow |= used_in_fp32(part, named)
                        part.backward(inputs=trainable)  # not into parameters that the user's trainer may hold itself
                    loss += float(part.detach())
                    outputs |= rows.split(batch, self._compared(capture.outputs))
        gradients = _gradients_of(named)
        norm = torch.nn.utils.clip_grad_norm_([p for p in trainable if p.grad is not None], self._max_norm)
        clipped = _gradients_of(named)
        optimizer = torch.optim.SGD(trainable, lr=self._learning_rate)
        optimizer.step()
        optimizer.zero_grad()
        return ReferenceStep(
            loss=loss,
            valid_tokens=sum(batch.valid_tokens for batch in batches),
            denominator=denominator,
            grad_norm=float(norm),
            gradients=gradients,
            clipped=clipped,
            parameters={name: p.detach().cpu().clone() for name, p in named.items()},
            outputs=outputs,
            used_in_fp32=frozenset(narrow),
        )

    def continue_from(self, parameters: Mapping[str, torch.Tensor | None]) -> None:
        """Take the parameters of the declared run, which agree, so that the next step starts from the same ones."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                value = parameters[name]
                if value is None:
                    raise AssertionError(f"{name} agreed without a value.")
                p.copy_(value)

    def loss_of(
        self, batch: GlobalBatch, *, inputs: Mapping[str, Any] | None = None, shift_labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the user's loss of a whole batch, summed over its tokens.

        Args:
            batch: The batch.
            inputs, shift_labels: What takes the place of the batch's own.
        """
        moved = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in (batch.inputs if inputs is None else inputs).items()
        }
        labels = batch.shift_labels if shift_labels is None else shift_labels
        weights = _weights_for(batch, labels)
        return self._trainer_class.compute_loss_sum(
            self._view,
            moved,
            labels.to(self.device),
            **({} if weights is None else {"loss_weights": weights.to(self.device)}),
        )

    def weight_of(self, batch: GlobalBatch, shift_labels: torch.Tensor) -> float:
        """Return what labels `[B, S]` of a batch add to the denominator of the loss."""
        weight = self._trainer_class.loss_weight_sum(self._view, shift_labels, _weights_for(batch, shift_labels))
        return float((shift_labels != IGNORED).sum()) if weight is None else weight

    def _compared(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: output for name, output in outputs.items() if self._compares_logits or name != LOGITS}

    def _auxiliary_loss(self, batch: GlobalBatch, rows: MicroStepRows) -> torch.Tensor | float:
        layout = SequenceLayout.contiguous(
            global_length=batch.shift_labels.shape[1],
            multiple_of=1,
            cp_size=1,
            cp_rank=0,
            real_keys=None if bool(batch.real.all()) else batch.real,
        )
        loss = self._trainer_class.compute_auxiliary_loss(
            self._view, layout, batch_size=len(batch.real), dp_cp_mesh=None
        )
        if loss is None:
            return 0.0
        if len(rows.batches) > 1:
            raise InvalidInputError(
                "verify computes the auxiliary loss of all data-parallel ranks over one batch of all their rows, but "
                "their micro-batches have unlike shapes or fields; give them the same."
            )
        return loss / rows.num_micro_steps

    def rewind(self) -> None:
        """Set the parameters back to where the last step began."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self._before[name])

    def partial_loss(self, batch: GlobalBatch, shift_labels: torch.Tensor, names: Iterable[str]) -> PartialLoss:
        """Return what some labels of a batch add to loss and gradients; parameters are where they are now.

        Args:
            batch: A whole batch.
            shift_labels: `[B, S]`: its labels, most of them -100.
            names: Parameters whose gradients are wanted.
        """
        named = {name: self.model.get_parameter(name) for name in names}
        loss = self.loss_of(batch, shift_labels=shift_labels)
        loss_sum = float(loss.detach())
        if not loss.requires_grad or not named:
            return PartialLoss(loss_sum, {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in named.items()})
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
        return PartialLoss(loss_sum, {name: g.cpu() for name, g in zip(named, found, strict=True)})


def _micro_steps(batches: Sequence[GlobalBatch]) -> list[MicroStepRows]:
    groups: dict[int, list[GlobalBatch]] = {}
    for batch in batches:
        groups.setdefault(batch.micro_batch, []).append(batch)
    return [MicroStepRows.of(group, num_micro_steps=len(groups)) for group in groups.values()]


def _weights_for(batch: GlobalBatch, shift_labels: torch.Tensor) -> torch.Tensor | None:
    """Return the weights of some labels of a batch, 0 where there is none."""
    if batch.loss_weights is None:
        return None
    padded = torch.nn.functional.pad(batch.loss_weights, (0, shift_labels.shape[1] - batch.loss_weights.shape[1]))
    return padded.masked_fill(shift_labels == IGNORED, 0)


def _gradients_of(named: Mapping[str, torch.nn.Parameter]) -> Gradients:
    return {name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in named.items()}


def _on_one_device(config: Any) -> Any:
    one = dict.fromkeys(("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "ep_size", "pp_size"), 1)
    one |= {"sequence_parallel": False, "loss_parallel": False}
    update = {"accelerator": config.accelerator.model_copy(update=one)}
    return config.model_copy(update=update | {"loss": config.loss.model_copy(update={"chunk_tokens": None})})
