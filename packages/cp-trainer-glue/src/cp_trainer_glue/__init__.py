"""Training under context parallelism from a config: declared, checked, planned, applied, run.

Modules, lowest first: `_yaml_file`, `_files`, `_config`, `_combinations`, `_structure`, `_mesh`,
`_sequence_parallel_plan`, `_tensor_parallel_plan`, `_plan`, `_sequence_parallel`, `_tensor_parallel`, `_resolver`,
`_planner`, `_applier`, `_tokenizer`, `_model`, `_inspection`, `_topology`, `_plan_report`, `_plan_view`, `_planning`,
`_text`, `_data`, `_loss`, `_vocab_parallel_loss`, `_optimizer`, `_blocks`, `_recomputation`, `_compilation`,
`_sharded_parameters`, `_gradient_domain`, `_metrics`, `_progress`, `_checkpoint`, `_stop`, `_trainer`, `_worker`,
`_launcher`, `cli`.
"""

from importlib.metadata import version

from ._applier import ShardingApplier, apply_sharding_plan
from ._config import TrainerConfig
from ._inspection import Correction, Inspection, Setting, inspect_config, load_config
from ._mesh import MeshContext
from ._model import HyperAutoModel
from ._plan import ModuleShardingSpec, ShardingPlan
from ._plan_report import PlanReport, plan_report
from ._planner import ShardingPlanner
from ._resolver import PlanOverrideResolver
from ._trainer import BaseTrainer, StepResult, TextTrainer, Window
from ._verify import verify_training
from ._verify_cause import Cause
from ._verify_check import Check
from ._verify_options import VerifyOptions
from ._verify_report import VerifyReport
from ._yaml_file import ConfigError

__version__ = version("cp-trainer-glue")

__all__ = [
    "BaseTrainer",
    "Cause",
    "Check",
    "ConfigError",
    "Correction",
    "HyperAutoModel",
    "Inspection",
    "MeshContext",
    "ModuleShardingSpec",
    "PlanOverrideResolver",
    "PlanReport",
    "Setting",
    "ShardingApplier",
    "ShardingPlan",
    "ShardingPlanner",
    "StepResult",
    "TextTrainer",
    "TrainerConfig",
    "VerifyOptions",
    "VerifyReport",
    "Window",
    "apply_sharding_plan",
    "inspect_config",
    "load_config",
    "plan_report",
    "verify_training",
]
