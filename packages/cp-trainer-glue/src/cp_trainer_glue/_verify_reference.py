"""One device: the model as it was built, the whole batch, and a loop of plain torch.

It shares with the trainer only what is the user's: the model, the batches and `compute_loss_sum`.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ._trainer import BaseTrainer
from ._verify_batches import GlobalBatch
from ._verify_capture import LayerCapture

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


class PartialLoss(NamedTuple):
    """The loss sum of some labels and its gradients."""

    loss_sum: float
    gradients: dict[str, torch.Tensor]


class Reference:
    """Trains the unwrapped model.

    Args:
        trainer: The declared run's trainer, for its hook alone.
        trainer_class: The user's class, whose `compute_loss_sum` is called.
        model: The model before anything was applied to it; trained in place.
        learning_rate: Of SGD.
    """

    def __init__(
        self, trainer: BaseTrainer, trainer_class: type[BaseTrainer], model: torch.nn.Module, *, learning_rate: float
    ) -> None:
        self.model, self.device = model.to(trainer.meshes.device).train(), trainer.meshes.device
        self._trainer_class, self._learning_rate = trainer_class, learning_rate
        self._max_norm = trainer.config.training.max_grad_norm
        # The user's hook sees its trainer with this model in the place of the wrapped one.
        self._view = copy.copy(trainer)
        self._view.model = self.model
        self._view.config = _on_one_device(trainer.config)
        self._before: dict[str, torch.Tensor] = {}

    def step(self, batches: Sequence[GlobalBatch]) -> ReferenceStep:
        """Make one step over the micro-batches of all data-parallel ranks."""
        named = dict(self.model.named_parameters())
        self._before = {name: p.detach().clone() for name, p in named.items()}
        trainable = [p for p in named.values() if p.requires_grad]
        denominator = sum(batch.weight for batch in batches) or 1.0
        loss, outputs = 0.0, {}
        with LayerCapture(self.model) as capture:
            for batch in batches:
                capture.begin()
                part = self.loss_sum(batch.inputs, batch.shift_labels) / denominator
                if part.requires_grad:
                    part.backward(inputs=trainable)  # not into parameters that the user's trainer may hold itself
                loss += float(part)
                outputs[batch.dp_rank, batch.micro_batch] = capture.outputs
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
        )

    def loss_sum(self, inputs: Mapping[str, Any], shift_labels: torch.Tensor) -> torch.Tensor:
        """Return the user's loss of a whole batch."""
        moved = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }
        return self._trainer_class.compute_loss_sum(self._view, moved, shift_labels.to(self.device))

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
        loss = self.loss_sum(batch.inputs, shift_labels)
        if not loss.requires_grad or not named:
            return PartialLoss(float(loss), {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in named.items()})
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
        return PartialLoss(float(loss), {name: g.cpu() for name, g in zip(named, found, strict=True)})


def _gradients_of(named: Mapping[str, torch.nn.Parameter]) -> Gradients:
    return {name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in named.items()}


def _on_one_device(config: Any) -> Any:
    one = dict.fromkeys(("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "ep_size", "pp_size"), 1)
    one |= {"sequence_parallel": False, "loss_parallel": False}
    return config.model_copy(update={"accelerator": config.accelerator.model_copy(update=one)})
