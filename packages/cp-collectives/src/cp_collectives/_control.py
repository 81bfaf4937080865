"""The control plane: small host-side messages, so that a fault on one rank stops all with that rank's words.

It runs on the group's CPU backend: nothing here waits for a device.
"""

import weakref
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._errors import ContextParallelError, InvalidInputError, LifecycleError, PeerError, UnsupportedError
from ._mesh import group_of

_KINDS = {kind.__name__: kind for kind in (InvalidInputError, UnsupportedError, LifecycleError)}
_FIRST_FAILURE = "context_parallel/first_failure"

# CPU groups made beside device groups that have no CPU backend; an entry goes when its device group goes.
_cpu_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def gather_objects(obj: Any, *, mesh: DeviceMesh | None) -> list[Any]:
    """Return every rank's object, in rank order, on all ranks of a 1-D mesh.

    Args:
        obj: A small picklable object.
        mesh: 1-D mesh. None or one rank: returns `[obj]`.
    """
    group = group_of(mesh)
    if group is None:
        return [obj]
    control = _control_group(group)
    objects: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(objects, obj, group=control)
    return objects


def agree(error: BaseException | str | None, *, mesh: DeviceMesh | None) -> None:
    """Stop all ranks if one of them found a fault.

    Every rank of the mesh calls it at the same point, with what it found or None.

    Args:
        error: The fault of this rank (a string counts as an `InvalidInputError`), or None.
        mesh: 1-D mesh of the ranks that must stop together.

    Raises:
        ContextParallelError: On all ranks, if any had a fault: of the kind and with the message of the ranks that
            found it, which are named unless all found the same.
    """
    found = None if error is None else (type(error).__name__, str(error))
    faults = gather_objects(found, mesh=mesh)
    if not any(faults):
        return
    kind = next(fault[0] for fault in faults if fault)
    raised = _KINDS.get(kind, InvalidInputError if kind == "str" else ContextParallelError)
    raise raised(_merged_message(faults)) from (error if isinstance(error, BaseException) else None)


def _merged_message(faults: list[tuple[str, str] | None]) -> str:
    messages: dict[str, list[int]] = {}
    for rank, fault in enumerate(faults):
        if fault is not None:
            messages.setdefault(fault[1], []).append(rank)
    if list(messages.values()) == [list(range(len(faults)))]:
        return next(iter(messages))
    return "\n".join(f"rank {', '.join(map(str, ranks))}: {message}" for message, ranks in messages.items())


def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if torch.device("cpu") in group._device_types:
        return group
    if group not in _cpu_groups:
        ranks = dist.get_process_group_ranks(group)
        _cpu_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _cpu_groups[group]


class FailureReport:
    """Context manager around a training run: peers of a failing rank show its message instead of a broken connection.

    The first rank that fails publishes its message in the rendezvous store before the exception goes on; a rank whose
    collective then breaks raises `PeerError` with that message.
    """

    def __init__(self) -> None:
        # Whether this rank was the first to fail.
        self.is_first = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None or isinstance(exc, SystemExit) or not dist.is_initialized():
            return
        own = f"rank {dist.get_rank()}: {type(exc).__name__}: {exc}"
        first = self._publish(own)
        self.is_first = first is None or first == own
        if not self.is_first and not isinstance(exc, ContextParallelError):
            raise PeerError(f"another rank stopped the run: {first}") from exc

    @staticmethod
    def _publish(message: str) -> str | None:
        """Return the first failure's message, which is `message` if nobody failed before; None if the store is gone."""
        store = dist.distributed_c10d._get_default_store()
        try:
            return str(store.compare_set(_FIRST_FAILURE, "", message).decode())
        except dist.DistError:
            return None  # the host of the store died with it; the exception at hand is all that is left to show
