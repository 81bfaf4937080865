"""Stopping on Ctrl-C: not in the middle of a step, and on all ranks after the same one."""

import signal
from types import FrameType, TracebackType
from typing import Self

from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import gather_objects


class StopRequest:
    """Context manager that turns SIGINT and SIGTERM into a request that all ranks see after the same step."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._asked = False
        self._earlier: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._earlier[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; all ranks call it after each step."""
        return any(gather_objects(self._asked, mesh=self._mesh))

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True
