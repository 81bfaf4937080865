"""One message in flight: launch, trace, wait, and what happens to one that nobody waits for."""

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._errors import LifecycleError
from ._exit import finish_threads_at_exit
from ._ledger import describe, ledger, raise_if_lost
from ._mesh import mesh_name
from ._trace import CollectiveRecord, Phase, now, record_launch
from ._watch import MessageBuffers, watchers

Operation = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce", "all_reduce_max"]


class Message:
    """A collective in flight.

    It holds input and output alive until the wait: device backends keep neither (HCCL holds inputs weakly), and a wait
    there only orders streams.
    """

    def __init__(
        self,
        op: Operation,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        mesh: DeviceMesh,
        layer: str | None,
        phase: Phase,
    ) -> None:
        raise_if_lost()
        finish_threads_at_exit()
        self.op: Operation = op
        self.layer = layer
        self.invocation = ledger.next_invocation(layer)
        self._reported = False
        self._buffers: MessageBuffers | None = watchers.buffers(describe(self), output, input)
        self._record = CollectiveRecord(
            op=op,
            group=mesh_name(mesh),
            dtype=input.dtype,
            bytes_received=_bytes_received(op, output, mesh.size()),
            layer=layer,
            phase=phase,
            launched_at=now(),
        )
        self._work: dist.Work | None = _launch(op, *self._buffers.travelling, mesh.get_group())
        self._buffers.launched()
        ledger.add(self)
        record_launch(self._record)

    @property
    def in_recompute(self) -> bool:
        return self._record.phase == "recompute"

    def wait(self) -> torch.Tensor:
        """Wait and return the output buffer.

        Raises:
            LifecycleError: If it was waited for before.
        """
        if self._work is None or self._buffers is None:
            raise LifecycleError(f"{describe(self)} was waited for twice; its result can be taken once.")
        self._work.wait()
        buffers = self._buffers
        self._release()
        buffers.waited()
        return buffers.output

    def drain(self) -> None:
        """Wait and drop the result."""
        if self._work is None or self._buffers is None:
            return
        self._work.wait()
        self._buffers.dropped()
        self._release()

    def mark_reported(self) -> None:
        """Note that it was reported as never waited for, so that its end is no second report."""
        self._reported = True
        ledger.discard(self)

    def _release(self) -> None:
        self._record.waited_at = now()
        self._work = self._buffers = None
        ledger.discard(self)

    def __del__(self) -> None:
        if getattr(self, "_work", None) is None or self._reported:
            return
        if self.in_recompute:
            self.drain()  # the early stop of non-reentrant recomputation leaves a forward half way
        else:
            ledger.lose(describe(self))


def _bytes_received(op: Operation, output: torch.Tensor, num_ranks: int) -> int:
    total = output.numel() * output.element_size()
    if op in ("all_reduce", "all_reduce_max"):  # a reduce-scatter and a gather of the same bytes
        return 2 * total * (num_ranks - 1) // num_ranks
    if op == "reduce_scatter":
        return total * (num_ranks - 1)
    return total * (num_ranks - 1) // num_ranks


def _launch(op: Operation, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work | None
    if op == "all_gather":
        work = dist.all_gather_single(output, input, group=group, async_op=True)
    elif op == "all_to_all":
        work = dist.all_to_all_single(output, input, group=group, async_op=True)
    elif op == "reduce_scatter":
        work = dist.reduce_scatter_single(output, input, group=group, async_op=True)
    else:  # in place: output and input are one tensor
        operation = dist.ReduceOp.MAX if op == "all_reduce_max" else dist.ReduceOp.SUM
        work = dist.all_reduce(output, operation, group=group, async_op=True)
    if work is None:
        raise AssertionError(f"{op} returned no handle: this process is not in the group, or launches are coalesced.")
    return work
