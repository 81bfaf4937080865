"""Finds programs that use the buffers of a collective between its launch and its wait.

On gloo such a program is often right by luck, since the data is there before anybody looks; on a device backend it
trains on garbage. Here the collective works on buffers of the sanitizer, so that nothing depends on who is faster: the
message's own output holds poison until the wait, and its own input is compared at the wait with what was launched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from cp_collectives import LifecycleError, check_no_pending
from cp_collectives._ledger import ledger
from cp_collectives._watch import watchers
from cp_collectives.testing._memory import Memory
from cp_collectives.testing._npu_stand_in import NpuStandInTensor
from cp_collectives.testing._operators import accesses, is_copy, is_view, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType
    from typing import Any


class PendingBufferSanitizer(TorchDispatchMode):
    """Context manager that refuses what no program may do to the buffers of a collective in flight.

    `World.run` opens it around each function. An error names the operator, and the collective's operation, layer and
    invocation. These are errors, in forward and in backward:

    - an operator that reads an output, or any view of it, before its wait; sizes, strides and views are free;
    - an operator that writes to an input or an output between launch and wait, and then it does not run;
    - an input or output that is found changed at the wait, by whatever went past torch's operators;
    - a collective that was dropped, or is still in flight where the context ends.

    What goes past torch's operators (`tolist`, `numpy`), or runs in a thread that the program itself started, is not
    seen as it reads; it gets NaN, or the largest value of an integer dtype.
    """

    supports_higher_order_operators = True

    def __init__(self, *, where: str = "the sanitized block") -> None:
        """Describe the block.

        Args:
            where: What ends with the block, for the error about collectives still in flight there.
        """
        super().__init__()
        self._where = where
        # Written by the engine's threads and by finalizers, which may interrupt this very thread: each change is one
        # operation of a dict, which needs no lock.
        self._in_flight: dict[int, _LentBuffers] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile; by default it leaves everything eager under a mode, without a word."""
        return True

    def __enter__(self) -> Self:
        watchers.add(self)
        super().__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, tb)
        watchers.discard(self)
        self._in_flight.clear()
        try:
            if exc is None:
                check_no_pending(where=self._where)
        finally:
            _forget_messages()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # The mode is thread-local. On the CPU, backward runs in the thread that calls it; on a device it runs in the
        # engine's threads, to which the engine hands the modes of that thread.
        if any(map(_is_wrapper, types)):
            return NotImplemented  # it comes back with the tensors inside
        kwargs = kwargs or {}
        if not self._in_flight:
            return func(*args, **kwargs)
        self.check(str(func), accesses(func, args, kwargs))
        result = func(*args, **kwargs)
        if is_view(func) and is_copy(result, (args, kwargs)):
            self.check(str(func), ((tensor, False) for tensor in tensors_in((args, kwargs))))
        return result

    def check(self, who: str, uses: Iterable[tuple[torch.Tensor, bool]]) -> None:
        """Raise if one of these tensors, each used to read or (True) to write, lies in a buffer in flight.

        Raises:
            LifecycleError: Naming who uses it, and the collective.
        """
        for tensor, writes in uses:
            for lent in tuple(self._in_flight.values()):
                lent.check(who, tensor, writes=writes)

    @torch._disable_dynamo
    def lend(self, name: str, output: torch.Tensor, input: torch.Tensor) -> _LentBuffers:
        """Return buffers for the message `name`, after checking that its own are not in flight for another one."""
        self.check(f"the launch of {name}", [(input, False), (output, True)])
        return _LentBuffers(name, output, input, in_flight=self._in_flight)


class _LentBuffers:
    """The buffers of one message: its own, and those that travel in their place.

    Where a program is compiled with graph breaks, torch.compile would look into these methods too.
    """

    def __init__(
        self, name: str, output: torch.Tensor, input: torch.Tensor, *, in_flight: dict[int, _LentBuffers]
    ) -> None:
        self._name = name
        self._in_flight = in_flight
        self.output = output
        self._own_output, self._own_input = Memory(output), Memory(input)
        # A copy of the output too: it is the input of a collective in place.
        self._output, self._input = self._own_output.twin(), self._own_input.twin()
        self._poison = self._own_output.twin()
        self._poison.poison()
        self._is_in_place = self._own_output.overlaps(input)

    @property
    def travelling(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._output.tensor_like(self.output), self._input.tensor_like(self.output)

    @torch._disable_dynamo
    def launched(self) -> None:
        self._own_output.poison()
        self._in_flight[id(self)] = self

    @torch._disable_dynamo
    def waited(self) -> None:
        self.dropped()
        if not self._own_output.equals(self._poison):
            raise LifecycleError(self._changed("output"))
        if not self._is_in_place and not self._own_input.equals(self._input):
            raise LifecycleError(self._changed("input"))
        self._own_output.fill_from(self._output)

    def dropped(self) -> None:
        self._in_flight.pop(id(self), None)

    def check(self, who: str, tensor: torch.Tensor, *, writes: bool) -> None:
        if self._own_output.overlaps(tensor):
            if not writes:
                raise LifecycleError(
                    f"{who} reads the output of {self._name} before it was waited for; call wait() first and read what "
                    "it returns."
                )
            raise LifecycleError(
                f"{who} writes to the output of {self._name} while it is in flight; call wait() first."
            )
        if writes and self._own_input.overlaps(tensor):
            raise LifecycleError(
                f"{who} writes to the input of {self._name} while it is in flight; call wait() first, or launch a copy."
            )

    def _changed(self, buffer: str) -> str:
        return (
            f"the {buffer} of {self._name} changed between launch and wait, past torch's operators or in another "
            "thread; write to it after wait()."
        )


def _is_wrapper(kind: type) -> bool:
    return issubclass(kind, NpuStandInTensor) or is_traceable_wrapper_subclass_type(kind)


def _forget_messages() -> None:
    """Leave nothing to the next run: what is in flight now was reported, or an exception left it."""
    ledger.take_lost()
    for message in ledger.in_flight():
        message.mark_reported()
