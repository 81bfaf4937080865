"""The processes of one world from their start to their end: start them, ask them, stop them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from cp_collectives.testing._failures import RankFailure
from cp_collectives.testing._messages import RankSpec, Reply, receive, send
from cp_collectives.testing._worker import serve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from cp_collectives.testing._functions import FunctionReference
    from cp_collectives.testing._messages import Call, Reset

# Seconds that the other ranks have, after the first failure, to fail or finish by themselves.
GRACE = 5.0
# A death is noticed later than it happens, and peers may report the broken connection first; it counts so many seconds
# earlier.
_DEATH_LAG = 1.0
_OUTPUT_LINES = 20


class Ranks:
    """Living rank processes, one connection to each."""

    def __init__(
        self, size: int, *, backend: str, threads: int, store_port: int, setup: FunctionReference | None
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        folder = Path(self._directory.name)
        self._specs = [
            RankSpec(
                rank=rank,
                size=size,
                backend=backend,
                threads=threads,
                store_port=store_port,
                output_file=str(folder / f"rank{rank}.out"),
                stack_file=str(folder / f"rank{rank}.stack"),
                setup=setup,
            )
            for rank in range(size)
        ]
        self._output_starts = [0] * size
        started = [_start_rank(spec) for spec in self._specs]
        self._processes = [process for process, _ in started]
        self._connections = [connection for _, connection in started]

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid or 0 for process in self._processes]

    def all_alive(self) -> bool:
        """Return whether every process still runs."""
        return all(process.is_alive() for process in self._processes)

    def ask(self, message: Reset | Call, *, seconds: float) -> dict[int, Reply]:
        """Send `message` to all ranks and collect their replies.

        Returns after `seconds`, or `GRACE` seconds after the first failure; ranks without a reply run on.
        """
        self._output_starts = [_size_of(spec.output_file) for spec in self._specs]
        replies: dict[int, Reply] = {}
        for rank, connection in enumerate(self._connections):
            try:
                send(connection, message)
            except OSError:
                replies[rank] = Reply(failure=self._describe_death(rank))
        self._collect(replies, deadline=time.monotonic() + seconds)
        return replies

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the Python stacks of the threads of these ranks, as far as they can still be written."""
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self.pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        files = {rank: self._specs[rank].stack_file for rank in ranks}
        while time.monotonic() < deadline and not all(_size_of(file) for file in files.values()):
            time.sleep(0.05)
        # The handler writes line by line; give the last one time to finish.
        time.sleep(0.1)
        return {rank: Path(file).read_text(errors="replace") for rank, file in files.items()}

    def stop(self, *, patience: float = 0.0) -> None:
        """End all processes; those that wait for a message leave by themselves within `patience` seconds."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._directory.cleanup()

    def _collect(self, replies: dict[int, Reply], *, deadline: float) -> None:
        while len(replies) < len(self._specs):
            pending = {c: rank for rank, c in enumerate(self._connections) if rank not in replies}
            ready = wait(list(pending), max(0.0, _end_of(replies, deadline) - time.monotonic()))
            if not ready:
                return
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                replies[rank] = self._receive(rank)

    def _receive(self, rank: int) -> Reply:
        try:
            reply: Reply = receive(self._connections[rank])
        except (EOFError, OSError):
            return Reply(failure=self._describe_death(rank))
        if reply.failure is None:
            return reply
        return Reply(failure=reply.failure.with_output(self._read_output(rank)))

    def _describe_death(self, rank: int) -> RankFailure:
        died_at = time.monotonic() - _DEATH_LAG
        process = self._processes[rank]
        process.join(GRACE)
        code = process.exitcode
        by_signal = code is not None and code < 0
        name = signal.Signals(-code).name if code is not None and code < 0 else "ProcessExited"
        message = f"the process was ended by {name}" if by_signal else f"the process ended with exit status {code}"
        return RankFailure(
            rank=rank, failed_at=died_at, error_type=name, error_message=message, output=self._read_output(rank)
        )

    def _read_output(self, rank: int) -> str:
        with Path(self._specs[rank].output_file).open("rb") as file:
            file.seek(self._output_starts[rank])
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_OUTPUT_LINES:])


def _start_rank(spec: RankSpec) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    Path(spec.output_file).touch()
    Path(spec.stack_file).touch()
    # Not a daemon: a daemonic process may have no children, and a rank may want data loader workers.
    process = context.Process(target=serve, args=(theirs, spec), name=f"rank{spec.rank}", daemon=False)
    process.start()
    # While this side holds the rank's end too, the rank's death would not close the pipe.
    theirs.close()
    return process, ours


def _end_of(replies: dict[int, Reply], deadline: float) -> float:
    failed_at = [reply.failure.failed_at for reply in replies.values() if reply.failure is not None]
    return min([deadline, *(moment + GRACE for moment in failed_at)])


def _size_of(file: str) -> int:
    return Path(file).stat().st_size
