"""The run as the user declared it, watched from outside: what its parts were given and what they gave.

B batch, L tokens of this context-parallel rank.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cp_collectives import Platform, check_no_pending, gather_objects, mesh_rank
from cp_core import ContextParallelError, InvalidInputError, SequenceLayout, tensor_digest

from .._config import TrainerConfig
from .._trainer import BaseTrainer
from ._capture import LayerCapture
from ._options import VerifyOptions, prepare_model


class Coordinates(NamedTuple):
    """Where a rank stands."""

    dp: int
    cp: int
    tp: int


@dataclass(kw_only=True, slots=True)
class MicroStep:
    """What one rank saw of one micro-batch."""

    # Of the shard; None where nothing is sharded.
    layout: SequenceLayout | None
    # What the loss was given, [B, L].
    shift_labels: torch.Tensor
    # What the model was given, [B, L].
    received: dict[str, torch.Tensor] = field(default_factory=dict)
    # First output of each layer, on the host.
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Tensors:
    """A tensor per parameter, whole: digests of all ranks, values where they are needed."""

    # By rank, by name; None where a parameter has none.
    digests: list[dict[str, str | None]]
    # On the first rank all of them, on the others those that differ between ranks.
    values: dict[str, torch.Tensor | None]

    @property
    def differing(self) -> list[str]:
        """Names of what is not the same on all ranks, in the model's order."""
        names = dict.fromkeys(name for digests in self.digests for name in digests)
        return [name for name in names if len({digests.get(name, "absent") for digests in self.digests}) > 1]


@dataclass(kw_only=True, slots=True)
class DeclaredStep:
    """One optimizer step of the declared run, as this rank saw it."""

    # Global batches of this data-parallel rank, as the data stream gave them.
    batches: list[dict[str, Any]]
    micro_steps: list[MicroStep]
    loss: float
    valid_tokens: int
    grad_norm: float
    # Norms of what this rank itself held of the gradients: before and after they were joined over ranks.
    own_norms: tuple[float, float]
    gradients: Tensors
    clipped: Tensors
    parameters: Tensors
    # Digests of parameters that the optimizer has beside the model's; they have no name.
    foreign: list[str]
    # Trainable parameters that the optimizer lacks.
    not_optimized: list[str]
    # What check_no_pending says; empty if nothing is pending.
    pending: str


class DeclaredRun:
    """A trainer of the user's class, of which each part is watched; made on all ranks.

    Args:
        trainer_class: What `run` would use.
        config: The config that is verified.
        platform, device: As for the trainer.
        options: What is changed in the model that was built.
    """

    def __init__(
        self,
        trainer_class: type[BaseTrainer],
        config: TrainerConfig,
        platform: Platform,
        device: torch.device,
        *,
        options: VerifyOptions,
    ) -> None:
        self._watch = _Watch(options)
        watched = type(trainer_class.__name__, (_Watched, trainer_class), {"watch": self._watch})
        self.trainer: BaseTrainer = watched(config, platform, device)
        if type(self.trainer.optimizer) is not torch.optim.SGD:
            raise InvalidInputError(
                f"verify compares plain SGD steps, but {trainer_class.__name__} made a "
                f"{type(self.trainer.optimizer).__name__}; let it make the optimizer that config.optimizer names."
            )
        self.world = self.trainer.meshes.world_mesh

    @property
    def changes(self) -> tuple[str, ...]:
        """What was changed in the model that was built."""
        return tuple(self._watch.changes)

    @property
    def original(self) -> torch.nn.Module:
        """The model before anything was applied to it, on the first rank; a copy of its own."""
        if self._watch.original is None:
            raise AssertionError("only the first rank keeps the model as it was built.")
        return self._watch.original

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands."""
        meshes = self.trainer.meshes
        return Coordinates(meshes.dp_rank, mesh_rank(meshes.cp_mesh), mesh_rank(meshes.tp_mesh))

    def step(self, number: int) -> DeclaredStep:
        """Make one step as `train_step` does, and note what each part of it gave."""
        trainer, watch = self.trainer, self._watch
        watch.forget()
        with LayerCapture(trainer.model) as watch.capture:
            window = trainer.next_window()
            loss = trainer.accumulate(window)
            watch.end_micro_step()
        before = _own_norm(trainer.model)
        trainer.reduce_gradients()
        gradients = self._tensors({name: p.grad for name, p in trainer.model.named_parameters()})
        after = _own_norm(trainer.model)
        grad_norm = trainer.clip_gradients()
        clipped = self._tensors({name: p.grad for name, p in trainer.model.named_parameters()})
        not_optimized, foreign = self._optimized()
        trainer.update()
        for micro_step, batch in zip(watch.micro_steps, window.batches, strict=False):
            micro_step.layout = batch.get("cp_layout")
        return DeclaredStep(
            batches=watch.batches,
            micro_steps=watch.micro_steps,
            loss=float(loss),
            valid_tokens=window.valid_tokens,
            grad_norm=float(grad_norm),
            own_norms=(before, after),
            gradients=gradients,
            clipped=clipped,
            parameters=self._tensors(dict(trainer.model.named_parameters())),
            foreign=[tensor_digest(_whole(p)) for p in foreign],
            not_optimized=not_optimized,
            pending=_pending(number),
        )

    def _tensors(self, tensors: Mapping[str, torch.Tensor | None]) -> Tensors:
        whole = {name: None if tensor is None else _whole(tensor) for name, tensor in tensors.items()}
        own = {name: None if tensor is None else tensor_digest(tensor) for name, tensor in whole.items()}
        found = Tensors(digests=gather_objects(own, mesh=self.world), values=whole)
        if dist.get_rank() != 0:
            found.values = {name: whole[name] for name in found.differing if name in whole}
        return found

    def _optimized(self) -> tuple[list[str], list[torch.nn.Parameter]]:
        """Return trainable parameters that the optimizer lacks, and its parameters that are not the model's."""
        held = {id(p): p for group in self.trainer.optimizer.param_groups for p in group["params"]}
        named = {id(p): name for name, p in self.trainer.model.named_parameters() if p.requires_grad}
        lacking = [name for key, name in named.items() if key not in held]
        own = {id(p) for p in self.trainer.model.parameters()}
        return lacking, [p for key, p in held.items() if key not in own]


class _Watch:
    """What the watched trainer notes."""

    def __init__(self, options: VerifyOptions) -> None:
        self.options, self.capture = options, None  # type: VerifyOptions, LayerCapture | None
        self.changes: list[str] = []
        self.original: torch.nn.Module | None = None
        self.forget()

    def forget(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.micro_steps: list[MicroStep] = []

    def begin_micro_step(self, shift_labels: torch.Tensor) -> None:
        if self.capture is None:
            return
        self.end_micro_step()
        self.capture.begin()
        self.micro_steps.append(MicroStep(layout=None, shift_labels=shift_labels.detach().cpu()))

    def end_micro_step(self) -> None:
        if self.capture is not None and self.micro_steps:
            last, capture = self.micro_steps[-1], self.capture
            given = {name: value for name, value in capture.received.items() if isinstance(value, torch.Tensor)}
            last.outputs, last.received = capture.outputs, {name: value.cpu() for name, value in given.items()}


class _Watched(BaseTrainer):
    """What is put above the user's trainer class: it changes nothing but what `verify` says it changes."""

    watch: _Watch

    def build_data(self) -> Any:
        return _WatchedStream(super().build_data(), self.watch)

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        self.watch.changes += prepare_model(model, self.watch.options)
        if dist.get_rank() == 0:
            self.watch.original = _copy_of(model)
        return model

    def compute_loss_sum(self, inputs: dict[str, Any], shift_labels: torch.Tensor, **weights: Any) -> torch.Tensor:
        self.watch.begin_micro_step(shift_labels)
        return super().compute_loss_sum(inputs, shift_labels, **weights)


class _WatchedStream:
    """A data stream whose batches are noted."""

    def __init__(self, stream: Any, watch: _Watch) -> None:
        self._stream, self._watch = stream, watch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._stream:
            self._watch.batches.append(dict(batch))
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _copy_of(model: torch.nn.Module) -> torch.nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module may refuse it in words of its own
        raise InvalidInputError(
            f"verify trains a copy of the model on one device, but this {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}"
        ) from error


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()


def _own_norm(model: torch.nn.Module) -> float:
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    local = (g.to_local() if isinstance(g, DTensor) else g for g in gradients)
    return float(sum((g.detach().double().norm() ** 2 for g in local), torch.zeros((), dtype=torch.float64)) ** 0.5)


def _pending(number: int) -> str:
    try:
        check_no_pending(where=f"verified step {number}")
    except ContextParallelError as error:
        return str(error)
    return ""
