"""The messages that were launched and not yet waited for."""

import itertools
import threading
import weakref
from collections import Counter
from typing import Protocol

from ._errors import LifecycleError


class Waitable(Protocol):
    """What the ledger needs to know of a message in flight."""

    layer: str | None
    invocation: int

    @property
    def op(self) -> str:
        """Name of the collective."""
        ...

    @property
    def in_recompute(self) -> bool:
        """Whether activation checkpointing launched it while recomputing."""
        ...

    def drain(self) -> None:
        """Wait for the message and forget its result."""
        ...

    def mark_reported(self) -> None:
        """Note that it was reported as never waited for."""
        ...


class _Ledger:
    """Messages in flight and messages that were lost; the autograd engine's threads write to it too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: weakref.WeakSet[Waitable] = weakref.WeakSet()
        self._lost: list[str] = []
        self._invocations: Counter[str | None] = Counter()

    def next_invocation(self, layer: str | None) -> int:
        with self._lock:
            self._invocations[layer] += 1
            return self._invocations[layer]

    def add(self, message: Waitable) -> None:
        with self._lock:
            self._in_flight.add(message)

    def discard(self, message: Waitable) -> None:
        with self._lock:
            self._in_flight.discard(message)

    def lose(self, description: str) -> None:
        # Called from a finalizer, which may run while this very thread holds the lock: list.append needs none.
        self._lost.append(description)

    def take_lost(self) -> list[str]:
        lost, self._lost = self._lost, []
        return lost

    def in_flight(self) -> list[Waitable]:
        with self._lock:
            return sorted(self._in_flight, key=lambda message: (message.layer or "", message.invocation))


ledger = _Ledger()


def describe(message: Waitable) -> str:
    """Name a message in an error: operation, layer and invocation."""
    layer = "outside any layer" if message.layer is None else f"of layer {message.layer!r}"
    return f"{message.op} {layer} (invocation {message.invocation})"


def raise_if_lost() -> None:
    """Raise if a message was dropped without a wait since the last look.

    Raises:
        LifecycleError: Naming the layer and the invocation of each.
    """
    lost = ledger.take_lost()
    if lost:
        raise LifecycleError(
            f"{'; '.join(lost)}: launched and dropped without wait(). Ranks are out of step from here on; wait for "
            "each PendingCollective exactly once, also where an exception leaves the forward."
        )


def check_no_pending(*, where: str) -> None:
    """Raise if a message is still in flight; call it where a step ends.

    What activation checkpointing launched and its early stop left behind is waited for silently.

    Args:
        where: What just ended, for the message, for example `"training step 12"`.

    Raises:
        LifecycleError: Naming the layer and the invocation of each message left.
    """
    raise_if_lost()
    left = []
    for message in ledger.in_flight():
        if message.in_recompute:
            message.drain()
        else:
            left.append(message)
    if left:
        names = "; ".join(describe(message) for message in itertools.islice(left, 8))
        for message in left:
            message.mark_reported()
        raise LifecycleError(
            f"{len(left)} collective(s) still pending at the end of {where}: {names}. Wait for each PendingCollective."
        )
