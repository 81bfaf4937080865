"""Where the tokens of this rank stand in the global sequence.

B batch, S real global length, P padded global length, C ranks, L = P / C local length.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cp_collectives import InvalidInputError


class Chunk(NamedTuple):
    """A run of consecutive global positions."""

    start: int
    # One past the last position.
    stop: int


class RealRun(NamedTuple):
    """Rows of a batch whose real tokens, without the pads at either side, stand at the same positions."""

    batch: slice
    positions: Chunk


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceLayout:
    """The global coordinates of a local shard; masks, offsets, prefixes and reassembly derive from it.

    With P = 8 and C = 2, contiguous shards are 0123 and 4567; zigzag shards are 0167 and 2345.

    Raises:
        InvalidInputError: If the index is not `[L]` int64 on CPU with ascending runs inside the padded sequence.
    """

    # [L] int64 on CPU: the global position of each local token.
    global_index: torch.Tensor
    # S: tokens of the batch before padding.
    global_length: int
    # P: tokens after padding to the declared multiple.
    padded_length: int
    # [B, P] bool, True for a real key, one run per row; None if every key up to `global_length` is real.
    key_padding: torch.Tensor | None = None
    # [B, P] int64 document number of each position; None for one document per row.
    document_bounds: torch.Tensor | None = None
    # The index as runs, in local order: plain integers, so that a kernel never waits for a device.
    chunks: tuple[Chunk, ...] = field(init=False)
    # The real tokens, as plain integers too; rows without any are in none.
    real_runs: tuple[RealRun, ...] = field(init=False)

    def __post_init__(self) -> None:
        index = self.global_index
        if index.ndim != 1 or index.dtype != torch.int64 or index.device.type != "cpu" or index.numel() == 0:
            raise InvalidInputError(
                f"global_index must be a non-empty [L] int64 tensor on CPU, but got {index.dtype} "
                f"{tuple(index.shape)} on {index.device}."
            )
        chunks = _runs(index)
        in_range = all(chunk.start >= 0 and chunk.stop <= self.padded_length for chunk in chunks)
        if not in_range or not 1 <= self.global_length <= self.padded_length:
            raise InvalidInputError(
                f"positions {chunks} and global_length {self.global_length} must lie within the padded length "
                f"{self.padded_length}."
            )
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "real_runs", self._real_runs())

    @classmethod
    def contiguous(
        cls,
        *,
        global_length: int,
        multiple_of: int,
        cp_size: int,
        cp_rank: int,
        real_keys: torch.Tensor | None = None,
    ) -> "SequenceLayout":
        """Return the layout of equal consecutive shards.

        Args:
            global_length: S, tokens before padding.
            multiple_of: The padded length is the next multiple; itself a multiple of `cp_size`.
            cp_size: C.
            cp_rank: This rank's position.
            real_keys: `[B, S]` bool, True for a real key; None if all are.

        Raises:
            InvalidInputError: If the multiple is not one of `cp_size`.
        """
        if multiple_of % cp_size:
            raise InvalidInputError(
                f"the padded length is cut into {cp_size} equal shards, so its multiple must be one of {cp_size}, but "
                f"got {multiple_of}."
            )
        padded_length = -(-global_length // multiple_of) * multiple_of
        local_length = padded_length // cp_size
        start = cp_rank * local_length
        return cls(
            global_index=torch.arange(start, start + local_length),
            global_length=global_length,
            padded_length=padded_length,
            key_padding=None
            if real_keys is None
            else torch.nn.functional.pad(real_keys, (0, padded_length - global_length)),
        )

    def _real_runs(self) -> tuple[RealRun, ...]:
        if self.key_padding is None:
            return (RealRun(slice(None), Chunk(0, self.global_length)),)
        if self.key_padding.dtype != torch.bool or self.key_padding.shape[1:] != (self.padded_length,):
            raise InvalidInputError(
                f"key_padding must be [B, P] bool with P = {self.padded_length}, but got {self.key_padding.dtype} "
                f"{tuple(self.key_padding.shape)}."
            )
        return _grouped([_real_run(row, real) for row, real in enumerate(self.key_padding.cpu())])

    @property
    def local_length(self) -> int:
        """L, tokens of this rank."""
        return self.global_index.numel()

    def equals(self, other: "SequenceLayout") -> bool:
        """Whether both describe the same shard of the same batch shape."""
        return (
            (self.chunks, self.global_length, self.padded_length)
            == (other.chunks, other.global_length, other.padded_length)
            and _same(self.key_padding, other.key_padding)
            and _same(self.document_bounds, other.document_bounds)
        )


def _runs(index: torch.Tensor) -> tuple[Chunk, ...]:
    breaks = (index.diff() != 1).nonzero().flatten() + 1
    firsts = [0, *breaks.tolist()]
    lasts = [*breaks.tolist(), index.numel()]
    return tuple(Chunk(int(index[first]), int(index[last - 1]) + 1) for first, last in zip(firsts, lasts, strict=True))


def _real_run(row: int, real: torch.Tensor) -> Chunk:
    positions = real.nonzero().flatten()
    if positions.numel() == 0:
        return Chunk(0, 0)
    start, stop = int(positions[0]), int(positions[-1]) + 1
    if stop - start != positions.numel():
        raise InvalidInputError(
            f"the real keys of a row must be one run, with pads at its sides only, but row {row} has pads inside."
        )
    return Chunk(start, stop)


def _grouped(runs: list[Chunk]) -> tuple[RealRun, ...]:
    """Join neighbouring rows with equal runs and leave out the empty ones."""
    grouped: list[RealRun] = []
    for row, run in enumerate(runs):
        before = grouped[-1] if grouped else None
        if before is not None and before.positions == run and before.batch.stop == row:
            grouped[-1] = RealRun(slice(before.batch.start, row + 1), run)
        elif run.start < run.stop:
            grouped.append(RealRun(slice(row, row + 1), run))
    return tuple(grouped)


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)
