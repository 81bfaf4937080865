"""Tests on several ranks: worlds that stay alive between tests, a sanitizer of collectives, a stand-in for an npu.

`World.run` calls its function under a `PendingBufferSanitizer`: outputs of collectives are poisoned until they are
waited for, and reads before the wait, writes to buffers in flight and dropped handles are errors. `sanitize=False`
turns it off for one run.

Modules, lowest first: `_npu_module`, `_npu_stand_in`, `_memory`, `_operators`, `_sanitizer`; `_failures`, `_functions`,
`_messages`, `_worker`, `_ranks`, `_world`; `_gradcheck`; `pytest_plugin`, the only one that needs pytest.
"""

from cp_collectives.testing._failures import RankFailed, RankFailure, RanksTimedOut
from cp_collectives.testing._gradcheck import mean_gradient_over_ranks
from cp_collectives.testing._npu_stand_in import install_npu_stand_in, to_cpu, to_npu
from cp_collectives.testing._sanitizer import PendingBufferSanitizer
from cp_collectives.testing._world import World

__all__ = [
    "PendingBufferSanitizer",
    "RankFailed",
    "RankFailure",
    "RanksTimedOut",
    "World",
    "install_npu_stand_in",
    "mean_gradient_over_ranks",
    "to_cpu",
    "to_npu",
]
