"""Training under context parallelism from a config: declared, checked, planned, applied, run.

Modules, lowest first: `_config`, `_config_file`, `_mesh`, `_plan`, `_resolver`, `_planner`, `_applier`, `_tokenizer`,
`_text`, `_data`, `_model`, `_loss`, `_optimizer`, `_metrics`, `_progress`, `_checkpoint`, `_stop`, `_trainer`,
`_worker`, `_launcher`, `cli`.
"""

from importlib.metadata import version

from ._applier import ShardingApplier, apply_sharding_plan
from ._config import TrainerConfig
from ._config_file import ConfigError, load_config
from ._mesh import MeshContext
from ._model import HyperAutoModel
from ._plan import ModuleShardingSpec, ShardingPlan
from ._planner import ShardingPlanner
from ._resolver import PlanOverrideResolver
from ._trainer import BaseTrainer, StepResult, TextTrainer

__version__ = version("cp-trainer-glue")

__all__ = [
    "BaseTrainer",
    "ConfigError",
    "HyperAutoModel",
    "MeshContext",
    "ModuleShardingSpec",
    "PlanOverrideResolver",
    "ShardingApplier",
    "ShardingPlan",
    "ShardingPlanner",
    "StepResult",
    "TextTrainer",
    "TrainerConfig",
    "apply_sharding_plan",
    "load_config",
]
