"""Samples to evaluate or predict, each once, in as many forwards on every rank.

S global length of a sample. Five samples on two data-parallel ranks, two rows at once; x is a filler row,
which has no label and only keeps the numbers of forwards equal, as FSDP needs:

    forward    rank 0    rank 1
    0          0 1       2 3
    1          4 x       x x
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import agree, gather_objects
from cp_core import ContextParallelError, InvalidInputError, tensor_digest

from ._data import Batch
from ._mesh import MeshContext

Found = TypeVar("Found")

_LABEL_FIELDS = ("labels", "shift_labels")


class Samples(Protocol):
    """Samples of a global batch, the same on all ranks: each without its batch dim, such as `input_ids` `[S]`."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, torch.Tensor]:
        """Return one, on the host."""
        ...


class Share(NamedTuple):
    """What this data-parallel rank forwards at once."""

    # [rows, S] each, on the host.
    batch: Batch
    # Its first rows that are samples; the others are fillers.
    num_real: int


def shares_of(samples: Samples, *, rows: int, meshes: MeshContext) -> Iterator[Share]:
    """Yield this rank's part of each forward; as many on every rank.

    Args:
        samples: The same on all ranks, which is checked by their number and the first of them.
        rows: Samples of one forward on one data-parallel rank.
        meshes: Which part is this rank's.

    Raises:
        InvalidInputError: On all ranks, if samples differ between ranks, cannot be read or do not fit together.
    """
    _require_same_samples(samples, meshes.world_mesh)
    for start in range(0, len(samples), rows * meshes.dp_size):
        first = min(start + meshes.dp_rank * rows, len(samples))
        yield _share(samples, range(first, min(first + rows, len(samples))), rows, meshes.world_mesh)


def agreed_batches(batches: Iterable[Batch], *, mesh: DeviceMesh | None) -> Iterator[list[Batch]]:
    """Yield the samples of each batch, after all ranks agreed that they have one more.

    Args:
        batches: Global batches, the same on all ranks: tensors with one row for each sample.
        mesh: 1-D mesh of all ranks.

    Raises:
        InvalidInputError: On all ranks, if one has a batch more than another, or an entry without rows.
    """
    iterator = iter(batches)
    while True:
        batch = _agreed(lambda: _with_rows(next(iterator, None)), mesh, what="a batch to predict")
        more = gather_objects(batch is not None, mesh=mesh)
        if len(set(more)) > 1:
            raise InvalidInputError(
                "all ranks must predict the same batches, but after as many as others had, ranks "
                f"{', '.join(str(rank) for rank, has in enumerate(more) if has)} have more."
            )
        if batch is None:
            return
        yield [{name: value[row] for name, value in batch.items()} for row in range(_num_rows(batch))]


def _require_same_samples(samples: Samples, mesh: DeviceMesh | None) -> None:
    first = _agreed(lambda: samples[0] if len(samples) else {}, mesh, what="sample 0")
    digests = {name: tensor_digest(value) for name, value in first.items()}
    found = gather_objects((len(samples), digests), mesh=mesh)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise InvalidInputError(
                f"all ranks must be given the same samples, of which each takes its part, but rank {rank} has "
                f"{other[0]} and rank 0 has {found[0][0]}, or their first ones differ."
            )
    if not len(samples):
        raise InvalidInputError("there is no sample to evaluate or predict; give at least one.")


def _share(samples: Samples, indices: range, rows: int, mesh: DeviceMesh | None) -> Share:
    def read() -> Batch:
        given = [samples[index] for index in indices]
        filler = _without_labels(given[0] if given else samples[0])
        return _stacked([*given, *[filler] * (rows - len(given))], first=indices.start)

    batch = _agreed(read, mesh, what=f"a sample from {indices.start} to {indices.stop - 1}")
    return Share(batch, num_real=len(indices))


def _agreed(read: Callable[[], Found], mesh: DeviceMesh | None, *, what: str) -> Found:
    """Return what this rank reads, after all ranks agreed that none failed: the others would wait for it."""
    found: list[Found] = []
    fault: Exception | None = None
    try:
        found.append(read())
    except ContextParallelError as error:
        fault = error
    except Exception as error:  # a user's data fail in any way
        fault = InvalidInputError(f"{what} cannot be read: {error!r}")
    agree(fault, mesh=mesh)
    return found[0]


def _without_labels(sample: Mapping[str, torch.Tensor]) -> Batch:
    return {name: torch.full_like(value, -100) if name in _LABEL_FIELDS else value for name, value in sample.items()}


def _stacked(rows: Sequence[Mapping[str, torch.Tensor]], *, first: int) -> Batch:
    kinds = [{name: list(value.shape) for name, value in row.items()} for row in rows]
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise InvalidInputError(
                f"samples of one forward must have equal fields and lengths, but sample {first + index} has {kind} and "
                f"sample {first} has {kinds[0]}; pad them (labels -100), or set training.micro_batch_size to 1."
            )
    return {name: torch.stack([row[name] for row in rows]) for name in kinds[0]}


def _with_rows(batch: Batch | None) -> Batch | None:
    """Check that a batch can be cut into samples."""
    if batch is None:
        return None
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != _num_rows(batch):
            found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise InvalidInputError(
                f"a batch to predict must have a row of {name} for each of its {_num_rows(batch)} samples, but that is "
                f"{found}."
            )
    return batch


def _num_rows(batch: Batch) -> int:
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    if ids is None or ids.ndim < 2:
        raise InvalidInputError("a batch to predict needs input_ids [B, S] or inputs_embeds [B, S, H].")
    return len(ids)
