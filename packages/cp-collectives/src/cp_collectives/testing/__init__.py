"""Tests on several ranks: worlds that stay alive between tests, and a stand-in for the npu device.

Modules, lowest first: `_failures`, `_functions`, `_messages`, `_worker`, `_ranks`, `_world`; `_npu_module`,
`_npu_stand_in`; `pytest_plugin`, the only one that needs pytest.
"""

from cp_collectives.testing._failures import RankFailed, RankFailure, RanksTimedOut
from cp_collectives.testing._npu_stand_in import install_npu_stand_in, to_cpu, to_npu
from cp_collectives.testing._world import World

__all__ = [
    "RankFailed",
    "RankFailure",
    "RanksTimedOut",
    "World",
    "install_npu_stand_in",
    "to_cpu",
    "to_npu",
]
