"""Every byte that crosses ranks: how it is differentiated, launched, waited for, traced and agreed on.

Modules, lowest first: `_errors`, `_exit`, `_platform`, `_mesh`, `_trace`, `_watch`, `_ledger`, `_message`, `_packing`,
`_pending`, `_gather`, `_reduce`, `_control`. `cp_collectives.testing` is the harness for tests on several ranks.
"""

from importlib.metadata import version

from ._control import FailureReport, agree, gather_objects, gather_objects_to_first
from ._errors import ContextParallelError, InvalidInputError, LifecycleError, PeerError, UnsupportedError
from ._gather import GradientReduction, all_gather_sequence, flex_cp_allgather, launch_all_gather
from ._ledger import check_no_pending
from ._mesh import mesh_rank, mesh_size
from ._pending import PendingCollective
from ._platform import Platform, current_platform
from ._reduce import all_reduce_max, all_reduce_sum
from ._trace import CollectiveRecord, CollectiveTrace

__version__ = version("cp-collectives")

__all__ = [
    "CollectiveRecord",
    "CollectiveTrace",
    "ContextParallelError",
    "FailureReport",
    "GradientReduction",
    "InvalidInputError",
    "LifecycleError",
    "PeerError",
    "PendingCollective",
    "Platform",
    "UnsupportedError",
    "agree",
    "all_gather_sequence",
    "all_reduce_max",
    "all_reduce_sum",
    "check_no_pending",
    "current_platform",
    "flex_cp_allgather",
    "gather_objects",
    "gather_objects_to_first",
    "launch_all_gather",
    "mesh_rank",
    "mesh_size",
]
