"""What can go wrong in a rank, and the errors that tell the parent's test about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """One rank's failure: an exception that its function raised, or the end of its process."""

    rank: int
    failed_at: float  # seconds on the machine's monotonic clock, comparable between ranks
    error_type: str  # name of the exception's class, or of the signal that ended the process
    error_message: str
    traceback: str = ""
    output: str = ""  # the last lines that the rank wrote to stdout and stderr in this run

    def with_output(self, output: str) -> RankFailure:
        """Return a copy that carries the rank's last lines of output."""
        return replace(self, output=output)

    def describe(self) -> str:
        """Return the failure in full: rank, error, traceback, last lines of output."""
        parts = [f"rank {self.rank} failed with {self.error_type}: {self.error_message}"]
        if self.traceback:
            parts.append(self.traceback.rstrip())
        if self.output:
            parts.append(f"last output of rank {self.rank}:\n{self.output.rstrip()}")
        return "\n".join(parts)


class RankFailed(RuntimeError):
    """Raised by `World.run` when a rank raised or died; it shows the rank that failed first.

    Attributes:
        rank: The rank that failed first.
        error_type: Name of the exception's class, or of the signal (`"SIGABRT"`).
        error_message: The exception's own message.
        failures: Every rank's failure, first in time first.
        unfinished: Ranks that were still running when the grace after the first failure was over.
    """

    def __init__(self, failures: Sequence[RankFailure], *, unfinished: Sequence[int] = (), grace: float = 0.0) -> None:
        first = failures[0]
        self.rank = first.rank
        self.error_type = first.error_type
        self.error_message = first.error_message
        self.failures = tuple(failures)
        self.unfinished = tuple(unfinished)
        lines = [first.describe()]
        lines += [f"then rank {f.rank} failed with {f.error_type}: {f.error_message}" for f in failures[1:]]
        if unfinished:
            lines.append(f"ranks {list(unfinished)} were still running {grace:g} s later and were stopped")
        super().__init__("\n".join(lines))


class RanksTimedOut(TimeoutError):
    """Raised by `World.run` when ranks did not answer within the time limit.

    Attributes:
        ranks: The ranks that did not answer.
        stacks: For each of them, the Python stacks of its threads when the time was over.
    """

    def __init__(self, subject: str, *, seconds: float, stacks: Mapping[int, str]) -> None:
        self.ranks = tuple(sorted(stacks))
        self.stacks = dict(stacks)
        head = f"{subject} did not finish within {seconds:g} s on ranks {list(self.ranks)}; all ranks were stopped"
        body = [f"stack of rank {rank}:\n{stacks[rank].rstrip() or '(none written)'}" for rank in self.ranks]
        super().__init__("\n".join([head, *body]))
