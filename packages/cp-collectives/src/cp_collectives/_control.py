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
from ._exit import finish_threads_at_exit
from ._mesh import group_of

_KINDS = {kind.__name__: kind for kind in (InvalidInputError, UnsupportedError, LifecycleError, ContextParallelError)}
_STORE_PREFIX = "context_parallel"

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
    finish_threads_at_exit()
    control = _control_group(group)
    objects: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(objects, obj, group=control)
    return objects


def gather_objects_to_first(obj: Any, *, mesh: DeviceMesh | None) -> list[Any]:
    """Return every rank's object, in rank order, on the first rank of a 1-D mesh, and nothing on the others.

    Args:
        obj: A picklable object; tensors in it on the host, and no views of larger ones, which would travel too.
        mesh: 1-D mesh. None or one rank: returns `[obj]`.

    Returns:
        The objects on the first rank; an empty list on the others, which never hold what the first rank gets.
    """
    group = group_of(mesh)
    if group is None:
        return [obj]
    finish_threads_at_exit()
    control = _control_group(group)
    if dist.get_rank(control) != 0:
        dist.gather_object(obj, group=control, group_dst=0)
        return []
    objects: list[Any] = [None] * dist.get_world_size(control)
    dist.gather_object(obj, objects, group=control, group_dst=0)
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
    found = None if error is None else (_kind_of(error), str(error))
    faults = gather_objects(found, mesh=mesh)
    if not any(faults):
        return
    kind = _KINDS[next(fault[0] for fault in faults if fault)]
    raise kind(_merged_message(faults)) from (error if isinstance(error, BaseException) else None)


def _kind_of(error: BaseException | str) -> str:
    """Name the nearest kind that every rank knows: a higher layer's own class may not be importable everywhere."""
    if isinstance(error, str):
        return InvalidInputError.__name__
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((name for name in names if name in _KINDS), ContextParallelError.__name__)


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
        self._key = ""

    def __enter__(self) -> Self:
        if dist.is_initialized():
            # Every rank enters the same reports in the same order, so counting its own entries names this one.
            entries = _store().add(f"{_STORE_PREFIX}/reports_of_rank_{dist.get_rank()}", 1)
            self._key = f"{_STORE_PREFIX}/first_failure_of_report_{entries}"
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None or isinstance(exc, SystemExit) or not self._key:
            return
        own = f"rank {dist.get_rank()}: {type(exc).__name__}: {exc}"
        first = self._publish(own)
        self.is_first = first is None or first == own
        if not self.is_first and not isinstance(exc, ContextParallelError):
            raise PeerError(f"another rank stopped the run: {first}") from exc

    def _publish(self, message: str) -> str | None:
        """Return the first failure's message, which is `message` if nobody failed before; None if the store is gone."""
        try:
            return str(_store().compare_set(self._key, "", message).decode())
        except dist.DistError:
            return None  # the host of the store died with it; the exception at hand is all that is left to show


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
