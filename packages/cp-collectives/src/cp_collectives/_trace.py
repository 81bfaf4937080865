"""A record of every message that crosses ranks, for counting bytes and proving order."""

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

import torch

Phase = Literal["forward", "backward", "recompute"]


@dataclass(kw_only=True, slots=True)
class CollectiveRecord:
    """One message as seen by this rank."""

    op: str
    # Name of the mesh axis.
    group: str
    dtype: torch.dtype
    # Bytes that this rank receives from other ranks; its own share does not count.
    bytes_received: int
    # Fully qualified name of the attention module, or None where no layer asked.
    layer: str | None
    phase: Phase
    # Seconds on `time.perf_counter`.
    launched_at: float
    waited_at: float | None = None


@dataclass(kw_only=True, slots=True)
class CollectiveTrace:
    """Context manager that lists each message launched while it is open, on this rank.

    Messages of the control plane are not listed. Traces may nest; each sees all messages.

    Example:
        >>> with CollectiveTrace() as trace:
        ...     loss.backward()
        >>> sum(record.bytes_received for record in trace.records)
    """

    records: list[CollectiveRecord] = field(default_factory=list)

    def __enter__(self) -> Self:
        _open_traces.add(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        _open_traces.discard(self)


class _OpenTraces:
    """The traces that are open now.

    Process-wide on purpose: on accelerators the backward runs in the autograd engine's own threads, which see neither
    context variables nor thread-local state of the thread that opened the trace.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: list[CollectiveTrace] = []

    def add(self, trace: CollectiveTrace) -> None:
        with self._lock:
            self._traces.append(trace)

    def discard(self, trace: CollectiveTrace) -> None:
        with self._lock:
            self._traces = [other for other in self._traces if other is not trace]

    def append(self, record: CollectiveRecord) -> None:
        with self._lock:
            for trace in self._traces:
                trace.records.append(record)


_open_traces = _OpenTraces()


def record_launch(record: CollectiveRecord) -> None:
    """Show a message to every open trace."""
    _open_traces.append(record)


def now() -> float:
    """Return the trace's clock in seconds."""
    return time.perf_counter()


def forward_phase() -> Phase:
    """Return `recompute` inside a running backward (activation checkpointing), else `forward`."""
    in_backward = torch._C._current_graph_task_id() != -1  # what torch's own checkpoint asks
    return "recompute" if in_backward else "forward"
