"""What `torch.npu` is while the stand-in is installed: one device, and streams whose work is done when it is queued."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class StandInStream:
    """A stream of a device that finishes each operation before the host goes on, so there is nothing to order."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority

    def wait_stream(self, stream: StandInStream) -> None:
        """Do nothing: the other stream's work is done."""

    def wait_event(self, event: StandInEvent) -> None:
        """Do nothing: the event has happened."""

    def record_event(self, event: StandInEvent | None = None) -> StandInEvent:
        """Return an event that has happened."""
        return event or StandInEvent()

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Do nothing: all work is done."""


class StandInEvent:
    """An event that has happened."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: StandInStream | None = None) -> None:
        """Do nothing: the stream's work is done."""

    def wait(self, stream: StandInStream | None = None) -> None:
        """Do nothing: the event has happened."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the event has happened."""


class StandInModule:
    """The device module `torch.npu` of the stand-in; it also keeps the stand-in's operator registrations alive."""

    Stream = StandInStream
    Event = StandInEvent
    # torch.utils.checkpoint reads this name before it saves the random state.
    _initialized = True

    def __init__(self, libraries: tuple[torch.library.Library, ...]) -> None:
        self._libraries = libraries
        self._stream = StandInStream()

    def is_initialized(self) -> bool:
        """Return True: there is nothing to initialize."""
        return True

    def is_available(self) -> bool:
        """Return True: the stand-in is there once it is installed."""
        return True

    def device_count(self) -> int:
        """Return the number of stand-in devices of a process, 1."""
        return 1

    def current_device(self) -> int:
        """Return the index of the only device, 0."""
        return 0

    def set_device(self, device: object) -> None:
        """Do nothing: each process has one device."""

    def synchronize(self, device: object = None) -> None:
        """Do nothing: all work is done."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers come from the CPU generator, which the caller seeds."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """Return the CPU generator's state, from which the stand-in's random numbers come."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: object = None) -> None:
        """Set the CPU generator's state, from which the stand-in's random numbers come."""
        torch.set_rng_state(new_state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that torch.autocast may choose."""
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: object = None) -> StandInStream:
        """Return the stream that the innermost `stream` context has chosen."""
        return self._stream

    @contextlib.contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        """Make `stream` the current one inside the context."""
        previous, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = previous

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        """Do nothing: each process has one device."""
        yield

    def _is_in_bad_fork(self) -> bool:
        return False
