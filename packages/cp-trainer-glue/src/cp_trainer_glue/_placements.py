"""Where the tensors at an attention's boundary lie on the mesh, as declared, and whether what is there fits; no ranks.

An axis of the mesh either shards a tensor along a dim or replicates it. The words are those of DTensor.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch.distributed.tensor import Placement, Replicate, Shard

from cp_core import InvalidInputError
from cp_wrappers import BoundaryPlan

# Axes that a declaration may name.
PLACED_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
_SHARD = re.compile(r"shard\((\d+)\)")
# Dim of the tokens in what a method of ours is given, by the wrapper's `layout`.
_SEQUENCE_DIM = {"BNSD": 2, "BSND": 1}

# Placement by axis; an axis that is not there is not looked at.
Placements = Mapping[str, Placement]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryPlacements:
    """The placements of one attention's inputs and output."""

    inputs: Placements
    outputs: Placements
    # Whether gradients of the inputs are those of the whole, and not parts to be summed over tp.
    whole_input_gradients: bool = True

    def __str__(self) -> str:
        return f"in {shown(self.inputs)}, out {shown(self.outputs)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One rank's tensor, as the others are told of it."""

    # Position of the rank on each axis.
    coordinates: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str
    # L of the layout of this forward; None without one.
    local_length: int | None = None


def parse_placements(declared: Mapping[str, str], *, where: str) -> dict[str, Placement]:
    """Return declared words as placements.

    Args:
        declared: Axis -> `replicate` or `shard(<dim>)`.
        where: Who declares it, for the message.

    Raises:
        InvalidInputError: On an unknown axis or word.
    """
    placements: dict[str, Placement] = {}
    for axis, word in declared.items():
        match = _SHARD.fullmatch(word)
        if axis not in PLACED_AXES or (match is None and word != "replicate"):
            raise InvalidInputError(
                f"{where}: a placement is `replicate` or `shard(<dim>)` on an axis of {', '.join(PLACED_AXES)}, but "
                f"got {axis}: {word}."
            )
        placements[axis] = Replicate() if match is None else Shard(int(match[1]))
    return placements


def boundary_placements(
    plan: BoundaryPlan,
    *,
    inputs: Mapping[str, str] | None,
    outputs: Mapping[str, str] | None,
    sequence_parallel: bool,
) -> BoundaryPlacements:
    """Return the placements of one attention: those of its method, and over them what the user declared.

    Hidden states are `[B, L, H]`, or what the wrapper's `layout` says; a method of the user's own says by declaration
    where its tokens are.

    Args:
        plan: The attention.
        inputs, outputs: What the user declared; None for nothing.
        sequence_parallel: Whether what leaves it is sharded over tp along the sequence.
    """
    rows: dict[str, Placement] = {"dp_replicate": Shard(0), "dp_shard": Shard(0), "tp": Replicate()}
    layout = plan.wrapper.arguments.get("layout", "BNSD")
    separate = plan.wrapper.contract.strategy is not None and "layout" in plan.wrapper.contract.data_parameters
    if separate:
        rows |= {"cp": Shard(_SEQUENCE_DIM[layout]), "tp": Shard(3 - _SEQUENCE_DIM[layout])}
    elif plan.wrapper.contract.strategy is not None:
        rows |= {"cp": Shard(1)}
    left = {**rows, "tp": Shard(1)} if sequence_parallel and not separate else rows
    return BoundaryPlacements(
        inputs={**rows, **parse_placements(inputs or {}, where=f"{plan.fqn}: input_placements")},
        outputs={**left, **parse_placements(outputs or {}, where=f"{plan.fqn}: output_placements")},
        whole_input_gradients=not sequence_parallel,
    )


def shown(placements: Placements) -> str:
    """Return placements as YAML would have them."""
    return f"{{{', '.join(f'{axis}: {_word(placement)}' for axis, placement in placements.items())}}}"


def placement_fault(
    views: Sequence[View],
    placements: Placements,
    *,
    axes: Sequence[str],
    inputs: Sequence[str] | None = None,
    exact_lengths: bool = True,
) -> str | None:
    """Return what contradicts the placements, None if nothing does.

    Args:
        views: What each rank has, in rank order.
        placements: What is declared.
        axes: Names of the mesh's axes, in the order of the coordinates.
        inputs: Digests of what each rank's output was made of; with it, an output that is the same on ranks with
            different inputs is no shard.
        exact_lengths: Whether a tensor sharded over cp must hold the layout's tokens, as a gradient need not.
    """
    faults = (
        _axis_fault(views, index, axis, placements[axis], inputs, exact_lengths=exact_lengths)
        for index, axis in enumerate(axes)
        if axis in placements
    )
    return next((fault for fault in faults if fault is not None), None)


def _axis_fault(
    views: Sequence[View],
    index: int,
    axis: str,
    placement: Placement,
    inputs: Sequence[str] | None,
    *,
    exact_lengths: bool,
) -> str | None:
    for ranks in _lines(views, index):
        group = [views[rank] for rank in ranks]
        if len(group) == 1:
            continue
        if isinstance(placement, Shard):
            made_of = None if inputs is None else [inputs[rank] for rank in ranks]
            fault = _shard_fault(group, ranks, axis, placement.dim, made_of, exact_lengths=exact_lengths)
        else:
            fault = _replicate_fault(group, ranks, axis)
        if fault is not None:
            return fault
    return None


def _replicate_fault(group: Sequence[View], ranks: Sequence[int], axis: str) -> str | None:
    differing = [rank for rank, view in zip(ranks, group, strict=True) if view.digest != group[0].digest]
    if not differing:
        return None
    return (
        f"is declared replicate over {axis}, but rank {differing[0]} has other values than rank {ranks[0]} "
        f"(shapes {list(group[ranks.index(differing[0])].shape)} and {list(group[0].shape)})"
    )


def _shard_fault(
    group: Sequence[View],
    ranks: Sequence[int],
    axis: str,
    dim: int,
    inputs: Sequence[str] | None,
    *,
    exact_lengths: bool,
) -> str | None:
    head = f"is declared shard({dim}) over {axis}, but"
    shape, length = group[0].shape, group[0].local_length
    if dim >= len(shape):
        return f"{head} has {len(shape)} dims, {list(shape)}"
    others = [rank for rank, view in zip(ranks, group, strict=True) if view.shape != shape]
    if others:
        other = group[ranks.index(others[0])].shape
        return f"{head} is {list(shape)} on rank {ranks[0]} and {list(other)} on rank {others[0]}"
    if axis == "cp" and exact_lengths and length is not None and shape[dim] != length:
        found = [other for other, size in enumerate(shape) if size == length]
        hint = f"; dim {found[0]} has them" if found else ""
        return f"{head} a shard has {length} of {length * len(group)} tokens, and this is {list(shape)}{hint}"
    if inputs is not None and len({view.digest for view in group}) == 1 and len(set(inputs)) == len(inputs):
        return f"{head} all its ranks {list(ranks)} have the same values, made of different inputs"
    return None


def _lines(views: Sequence[View], axis: int) -> Iterator[list[int]]:
    """Yield the ranks that differ in their position on one axis only."""

    def elsewhere(rank: int) -> tuple[int, ...]:
        coordinates = views[rank].coordinates
        return (*coordinates[:axis], *coordinates[axis + 1 :])

    for _, ranks in groupby(sorted(range(len(views)), key=elsewhere), key=elsewhere):
        yield list(ranks)


def _word(placement: Placement) -> str:
    return f"shard({placement.dim})" if isinstance(placement, Shard) else "replicate"
