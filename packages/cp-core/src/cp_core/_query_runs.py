"""Which blocks of the score matrix a rank computes, as plain integers: what no query sees is never scored.

A run of queries at positions a..b-1 of a row whose real keys are f..e-1 sees its prefix f..a-1 in full and itself
causally. For f = 1 (a pad at the left), a = 4, b = 8:

           keys 0 123 4567 ...
    query 4       xxx x...          prefix: one full block      keys before f, and from b on: never touched
    query 5       xxx xx..          diagonal: one causal block

Under a window of w keys, runs are tiles of at most w queries, which have one more block at the window's edge. For a
tile 8..11 with w = 6:

           keys 2 345 67 8901
    query 8       xxx xx x...       edge: keys 3..5 after the diagonal, full: 6..7, diagonal: 8..11
    query 9       .xx xx xx..
"""

from collections.abc import Iterator
from typing import NamedTuple

from ._layout import Chunk, SequenceLayout
from .kernels import Visible

# Queries of one tile under a window: the diagonal and the edge waste about half of it each.
_TILE = 256


class KeyBlock(NamedTuple):
    """Keys at global positions start..stop-1, and which of them each query of the run sees."""

    start: int
    stop: int
    visible: Visible


class QueryRun(NamedTuple):
    """Consecutive queries that see the same blocks."""

    # Rows of the batch that share them.
    batch: slice
    # Local rows of the queries.
    rows: slice
    # Never empty; each query sees at least one key of one of them.
    blocks: tuple[KeyBlock, ...]


def query_runs(layout: SequenceLayout, *, causal: bool, window: int | None = None) -> tuple[QueryRun, ...]:
    """Return the runs of this rank's real queries; pads are in none of them.

    Args:
        layout: The rank's shard.
        causal: Whether a query sees only itself and earlier keys.
        window: Keys a query sees at most, itself included; causal only.
    """
    runs = []
    for batch, real in layout.real_runs:
        for rows, chunk in _rows_of(layout.chunks):
            start, stop = max(chunk.start, real.start), min(chunk.stop, real.stop)
            offset = rows.start - chunk.start
            for part, blocks in _parts(Chunk(start, stop), real, causal=causal, window=window):
                runs.append(QueryRun(batch, slice(part.start + offset, part.stop + offset), blocks))
    return tuple(runs)


def _rows_of(chunks: tuple[Chunk, ...]) -> Iterator[tuple[slice, Chunk]]:
    """Yield each chunk with the local rows that hold it."""
    first = 0
    for chunk in chunks:
        rows = slice(first, first + chunk.stop - chunk.start)
        first = rows.stop
        yield rows, chunk


def _parts(
    queries: Chunk, real: Chunk, *, causal: bool, window: int | None
) -> Iterator[tuple[Chunk, tuple[KeyBlock, ...]]]:
    """Cut real queries of one chunk into parts that see the same blocks."""
    start, stop = queries
    if start >= stop:
        return
    if not causal:
        yield queries, (KeyBlock(*real, "all"),)
        return
    whole = stop if window is None else min(stop, max(start, real.start + window))  # the window hides nothing before
    if start < whole:
        yield Chunk(start, whole), _causal_blocks(start, whole, first=real.start)
    if window is not None:
        for first in range(whole, stop, min(window, _TILE)):
            last = min(first + min(window, _TILE), stop)
            yield Chunk(first, last), _window_blocks(first, last, window)


def _causal_blocks(start: int, stop: int, *, first: int) -> tuple[KeyBlock, ...]:
    diagonal = KeyBlock(start, stop, "causal")
    return (diagonal,) if start == first else (diagonal, KeyBlock(first, start, "all"))


def _window_blocks(start: int, stop: int, window: int) -> tuple[KeyBlock, ...]:
    blocks = [KeyBlock(start, stop, "causal")]
    if stop - window < start:
        blocks.append(KeyBlock(stop - window, start, "all"))
    if stop - start > 1:
        blocks.append(KeyBlock(start - window + 1, stop - window, "after_diagonal"))
    return tuple(blocks)
