"""Which buffers a message travels in: its own, or those of a watcher such as the sanitizer of the testing package."""

import threading
from typing import Protocol

import torch


class MessageBuffers(Protocol):
    """Output and input of one message, and what its owner wants to know of the message's life."""

    @property
    def output(self) -> torch.Tensor:
        """The message's own output."""
        ...

    @property
    def travelling(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the input that the collective is given."""
        ...

    def launched(self) -> None:
        """The collective is in flight."""
        ...

    def waited(self) -> None:
        """The collective has finished, and the message hands out its output next."""
        ...

    def dropped(self) -> None:
        """The collective has finished, and nobody takes the output."""
        ...


class BufferWatcher(Protocol):
    """Lends buffers to messages while it watches."""

    def lend(self, name: str, output: torch.Tensor, input: torch.Tensor) -> MessageBuffers:
        """Return the buffers of the message `name` (see `describe`), just before its launch."""
        ...


class _OwnBuffers:
    """A message's own tensors, which travel as they are and are watched by nobody."""

    def __init__(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.output = output
        self.travelling = (output, input)

    def launched(self) -> None: ...

    def waited(self) -> None: ...

    def dropped(self) -> None: ...


class _Watchers:
    """The watchers on duty; the last one that came lends the buffers.

    Process-wide for the reason that open traces are: messages are launched in the autograd engine's own threads too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: tuple[BufferWatcher, ...] = ()

    def add(self, watcher: BufferWatcher) -> None:
        with self._lock:
            self._watchers = (*self._watchers, watcher)

    def discard(self, watcher: BufferWatcher) -> None:
        with self._lock:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)

    def buffers(self, name: str, output: torch.Tensor, input: torch.Tensor) -> MessageBuffers:
        watchers = self._watchers
        return watchers[-1].lend(name, output, input) if watchers else _OwnBuffers(output, input)


watchers = _Watchers()
