"""A step of the declared run, put together from all ranks on the first one, in global terms.

B batch, L tokens of one rank, S real global length, P padded global length.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import gather_objects
from cp_core import Chunk, InvalidInputError, tensor_digest

from ._batches import GlobalBatch, global_batch
from ._capture import LOGITS
from ._declared import Coordinates, DeclaredStep


class ShardView(NamedTuple):
    """What one rank was given of one micro-batch."""

    # Global positions of its tokens, in local order; None where nothing is sharded.
    chunks: tuple[Chunk, ...] | None
    padded_length: int
    shift_labels: torch.Tensor
    # input_ids, position_ids and what else the model got, [B, L].
    received: dict[str, torch.Tensor]

    @property
    def positions(self) -> torch.Tensor:
        """`[L]`: the global position of each token."""
        if self.chunks is None:
            return torch.arange(self.shift_labels.shape[1])
        return torch.cat([torch.arange(start, stop) for start, stop in self.chunks])


class Scalars(NamedTuple):
    """Numbers that one rank reported."""

    loss: float
    valid_tokens: int
    grad_norm: float
    own_norms: tuple[float, float]
    not_optimized: tuple[str, ...]
    foreign: tuple[str, ...]
    pending: str


@dataclass(kw_only=True, slots=True)
class GatheredStep:
    """One step of all ranks; whole on the first rank, elsewhere only what every rank has."""

    coordinates: list[Coordinates]
    # By rank.
    scalars: list[Scalars]
    # The micro-batches of the step on one device, in order of data-parallel rank and micro-batch.
    batches: list[GlobalBatch] = field(default_factory=list)
    # By micro-batch, by rank.
    views: list[list[ShardView]] = field(default_factory=list)
    # By data-parallel rank and micro-batch, by name, `[B, S, ...]`, in the order in which the modules ran.
    outputs: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    # Ranks whose global batch is another than that of the first rank of their data-parallel group.
    other_batches: list[int] = field(default_factory=list)
    # Data-parallel ranks all of whose batches are those of a lower one.
    repeated_batches: list[int] = field(default_factory=list)

    def rank_at(self, dp: int, cp: int, tp: int = 0) -> int:
        """Return the rank that stands somewhere."""
        return self.coordinates.index(Coordinates(dp, cp, tp))

    @property
    def cp_size(self) -> int:
        """How many ranks share a sequence."""
        return 1 + max(place.cp for place in self.coordinates)


def gather_step(
    step: DeclaredStep, coordinates: Coordinates, world: DeviceMesh, *, loss_parallel: bool
) -> GatheredStep:
    """Put a step together; every rank calls it.

    Args:
        step: What this rank saw.
        coordinates: Where this rank stands.
        world: 1-D mesh of all ranks.
        loss_parallel: Whether tensor-parallel ranks have parts of the vocabulary of the logits.

    Raises:
        InvalidInputError: If the trainer did not read its batches from its data stream, one for each micro-batch.
    """
    _require_recorded(step)
    places: list[Coordinates] = gather_objects(coordinates, mesh=world)
    gathered = GatheredStep(coordinates=places, scalars=gather_objects(_scalars_of(step), mesh=world))
    _gather_batches(step, gathered, coordinates, world)
    gathered.views = [gather_objects(_view_of(micro), mesh=world) for micro in step.micro_steps]
    for number, micro in enumerate(step.micro_steps):
        for name, parts in _gathered_outputs(micro.outputs, world):
            if dist.get_rank() == 0:
                dim = 2 if name == LOGITS and loss_parallel else 1
                _assemble(gathered, (number, name), parts, tp_dim=dim)
    return gathered


def _require_recorded(step: DeclaredStep) -> None:
    if len(step.batches) != len(step.micro_steps) or not step.batches:
        raise InvalidInputError(
            f"verify watches the batches of build_data and the calls of compute_loss_sum, but a step read "
            f"{len(step.batches)} batches and computed {len(step.micro_steps)} losses; read each micro-batch from "
            "self.stream and call compute_loss_sum once for it."
        )


def _scalars_of(step: DeclaredStep) -> Scalars:
    return Scalars(
        loss=step.loss,
        valid_tokens=step.valid_tokens,
        grad_norm=step.grad_norm,
        own_norms=step.own_norms,
        not_optimized=tuple(step.not_optimized),
        foreign=tuple(step.foreign),
        pending=step.pending,
    )


def _view_of(micro: Any) -> ShardView:
    layout, length = micro.layout, micro.shift_labels.shape[1]
    received = {name: value for name, value in micro.received.items() if value.ndim >= 2 and value.shape[1] == length}
    return ShardView(
        chunks=None if layout is None else layout.chunks,
        padded_length=length if layout is None else layout.padded_length,
        shift_labels=micro.shift_labels,
        received=received,
    )


def _gather_batches(step: DeclaredStep, gathered: GatheredStep, own: Coordinates, world: DeviceMesh) -> None:
    first = own.cp == 0 and own.tp == 0
    digests = gather_objects([_digests_of(batch) for batch in step.batches], mesh=world)
    for rank, place in enumerate(gathered.coordinates):
        if digests[rank] != digests[gathered.rank_at(place.dp, 0)]:
            gathered.other_batches.append(rank)
    readers = [digests[rank] for rank, place in enumerate(gathered.coordinates) if place.cp == place.tp == 0]
    gathered.repeated_batches = [dp for dp, read in enumerate(readers) if read in readers[:dp]]
    everyone = gather_objects([_on_host(batch) for batch in step.batches] if first else [], mesh=world)
    for place, batches in zip(gathered.coordinates, everyone, strict=True):
        for number, batch in enumerate(batches):
            gathered.batches.append(global_batch(batch, dp_rank=place.dp, micro_batch=number))


def _digests_of(batch: dict[str, Any]) -> dict[str, str]:
    return {name: tensor_digest(value) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _on_host(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _gathered_outputs(
    outputs: dict[str, torch.Tensor], world: DeviceMesh
) -> Iterator[tuple[str, list[torch.Tensor | None]]]:
    """Yield each module's output on all ranks; one at a time, since each may be large."""
    everyone = gather_objects(list(outputs), mesh=world)
    for name in dict.fromkeys(name for names in everyone for name in names):
        yield name, gather_objects(outputs.get(name), mesh=world)


def _assemble(
    gathered: GatheredStep, output: tuple[int, str], parts: list[torch.Tensor | None], *, tp_dim: int
) -> None:
    micro_batch, name = output
    views = gathered.views[micro_batch]
    for dp_rank in sorted({place.dp for place in gathered.coordinates}):
        shards = []
        for cp_rank in range(gathered.cp_size):
            ranks = [r for r, place in enumerate(gathered.coordinates) if (place.dp, place.cp) == (dp_rank, cp_rank)]
            held = [part for rank in ranks if (part := parts[rank]) is not None]
            if len(held) == len(ranks):
                shards.append((views[ranks[0]], _joined_over_tp(held, tp_dim, views[ranks[0]].shift_labels.shape[1])))
        if len(shards) == gathered.cp_size:
            batch = next(b for b in gathered.batches if (b.dp_rank, b.micro_batch) == (dp_rank, micro_batch))
            whole = in_global_order(shards)[:, : batch.shift_labels.shape[1]]
            gathered.outputs.setdefault((dp_rank, micro_batch), {})[name] = whole


def _joined_over_tp(parts: list[torch.Tensor], dim: int, length: int) -> torch.Tensor:
    """Return one context-parallel rank's shard: equal on tensor-parallel ranks, or sharded over them in a dim."""
    if len(parts) > 1 and (dim == 2 or parts[0].shape[1] != length):
        return torch.cat(parts, dim=dim)
    return parts[0]


def in_global_order(shards: list[tuple[ShardView, torch.Tensor]]) -> torch.Tensor:
    """Return `[B, P, ...]` of the shards `[B, L, ...]` of all context-parallel ranks."""
    view, first = shards[0]
    length = view.padded_length if view.chunks is not None else first.shape[1]
    whole = first.new_zeros(first.shape[0], length, *first.shape[2:])
    for view, shard in shards:
        whole[:, view.positions] = shard
    return whole
