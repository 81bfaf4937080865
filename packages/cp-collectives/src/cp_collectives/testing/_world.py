"""A world of ranks that stays alive between calls."""

from __future__ import annotations

import atexit
import pickle
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from cp_collectives.testing._failures import RankFailed, RanksTimedOut
from cp_collectives.testing._functions import FunctionReference
from cp_collectives.testing._messages import Call, Reset, unpickle
from cp_collectives.testing._ranks import GRACE, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from cp_collectives.testing._messages import Reply

T = TypeVar("T")

# Seconds for new processes to import torch and meet, and for living ones to make a new default group.
_START_LIMIT = 180.0
_RESET_LIMIT = 20.0


class World:
    """`size` rank processes on this machine that run functions together, one call after the other.

    The processes start at the first `run` (4 ranks take about 20 s on two cores) and serve all later ones. Each `run`
    begins with a new default process group, seed 0, float32 as default dtype and autograd enabled, under a
    `PendingBufferSanitizer`; groups of earlier runs are destroyed. The processes are replaced after a run in which
    ranks hung, died, or failed while others did not.

    The store lives in the parent, so the death of rank 0 takes nothing away from the others.
    """

    def __init__(
        self,
        size: int,
        *,
        time_limit: float = 60.0,
        setup: Callable[[], object] | None = None,
        backend: str = "gloo",
        threads: int = 1,
    ) -> None:
        """Describe the world; nothing is started yet.

        Args:
            size: Number of ranks.
            time_limit: Seconds that a `run` may take unless it says otherwise.
            setup: Module-level function that each new rank calls once, before its first process group.
            backend: What `torch.distributed.init_process_group` gets, for example "gloo" or "cpu:gloo,npu:gloo".
            threads: Number of threads of torch's operations in each rank.

        Raises:
            ValueError: `size` or `threads` is below 1, `time_limit` not above 0, or ranks cannot find `setup` by name.
        """
        if size < 1 or threads < 1 or time_limit <= 0:
            raise ValueError(
                "A world needs size >= 1, threads >= 1 and time_limit > 0 s, "
                f"but got size={size}, threads={threads}, time_limit={time_limit:g}."
            )
        self.size = size
        self.time_limit = time_limit
        self.backend = backend
        self.threads = threads
        self._setup = None if setup is None else FunctionReference.of(setup)
        self._store: dist.TCPStore | None = None
        self._ranks: Ranks | None = None
        self._num_resets = 0

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty while no ranks run."""
        return [] if self._ranks is None else self._ranks.pids

    def run(
        self,
        fn: Callable[..., T],
        /,
        *args: object,
        time_limit: float | None = None,
        sanitize: bool = True,
        **kwargs: object,
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` in every rank, with the default process group initialized.

        Args:
            fn: A module-level function; it learns its rank from `torch.distributed.get_rank()`.
            *args: Picklable arguments, the same for all ranks; tensors arrive as copies.
            time_limit: Seconds for this call; the world's own limit if None. Starting ranks does not count.
            sanitize: Whether each rank runs it under a `PendingBufferSanitizer`. It copies every message and looks at
                every operator; measure times without.
            **kwargs: Picklable keyword arguments.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankFailed: A rank raised or died; shows the one that was first.
            RanksTimedOut: Ranks did not answer in time; shows which, and where they were.
            ValueError: Ranks cannot find `fn` by name.
        """
        call = Call(function=FunctionReference.of(fn), arguments=pickle.dumps((args, kwargs)), sanitize=sanitize)
        seconds = self.time_limit if time_limit is None else time_limit
        self._make_ready()
        replies = self._ask(call, f"{call.function.qualified_name}()", seconds=seconds)
        return [unpickle(replies[rank].value) for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks; a later `run` would start new ones."""
        self._stop(patience=2.0)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_ready(self) -> None:
        if self._ranks is not None and not self._reset_living():
            self._stop()
        if self._ranks is None:
            self._ranks = self._start()
            self._ask(self._next_reset(), f"Starting {self.size} ranks", seconds=_START_LIMIT)

    def _reset_living(self) -> bool:
        """Give living ranks a new default group; False if some cannot, for example with a collective under way."""
        if self._ranks is None or not self._ranks.all_alive():
            return False
        replies = self._ranks.ask(self._next_reset(), seconds=_RESET_LIMIT)
        return len(replies) == self.size and all(reply.failure is None for reply in replies.values())

    def _start(self) -> Ranks:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            atexit.register(self.close)
        return Ranks(
            self.size, backend=self.backend, threads=self.threads, store_port=self._store.port, setup=self._setup
        )

    def _next_reset(self) -> Reset:
        self._num_resets += 1
        return Reset(prefix=f"run{self._num_resets}")

    def _ask(self, message: Reset | Call, subject: str, *, seconds: float) -> dict[int, Reply]:
        if self._ranks is None:
            raise AssertionError("a world asks its ranks only while they run")
        try:
            replies = self._ranks.ask(message, seconds=seconds)
            self._check(replies, subject, seconds=seconds)
        except RankFailed as error:
            # Only if every rank raised is nothing under way that a peer could still wait for.
            if len(error.failures) < self.size or not self._ranks.all_alive():
                self._stop()
            raise
        except BaseException:
            self._stop()
            raise
        return replies

    def _check(self, replies: dict[int, Reply], subject: str, *, seconds: float) -> None:
        silent = [rank for rank in range(self.size) if rank not in replies]
        failures = [reply.failure for reply in replies.values() if reply.failure is not None]
        if failures:
            raise RankFailed(sorted(failures, key=lambda f: f.failed_at), unfinished=silent, grace=GRACE)
        if silent and self._ranks is not None:
            raise RanksTimedOut(subject, seconds=seconds, stacks=self._ranks.stacks(silent))

    def _stop(self, *, patience: float = 0.0) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.stop(patience=patience)
