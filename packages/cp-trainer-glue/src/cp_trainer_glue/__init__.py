"""Training under context parallelism from a config: declared, checked, planned, applied, run.

Modules, lowest first: `_yaml_file`, `_files`, `_output`, `_config`, `_gradient_sums`, `_combinations`, `_structure`,
`_mesh`, `_expert_balance`, `_sequence_parallel_plan`, `_tensor_parallel_plan`, `_placements`, `_plan`, `_validation`,
`_sequence_parallel`, `_tensor_parallel`, `_resolver`, `_planner`, `_applier`, `_tokenizer`, `_parameter_bytes`,
`_model`, `_inspection`, `_topology`, `_plan_report`, `_plan_view`, `_planning`, `_text`, `_data`, `_samples`, `_loss`,
`_vocab_parallel_loss`, `_optimizer`, `_blocks`, `_recomputation`, `_compilation`, `_sharded_parameters`,
`_gradient_domain`, `_window`, `_undisturbed`, `_evaluation`, `_metrics`, `_summary`, `_progress`, `_checkpoint_parts`,
`_checkpoint`, `_stop`, `_trainer`, `_text_trainer`, `_verify`, `_verify_view`, `_worker`, `_verifying`, `_launcher`,
`cli`.
"""

from importlib.metadata import version

from ._applier import ShardingApplier, apply_sharding_plan
from ._config import TrainerConfig
from ._evaluation import EvalResult, Prediction
from ._inspection import Correction, Inspection, Setting, inspect_config, load_config
from ._mesh import MeshContext
from ._model import HyperAutoModel
from ._plan import ModuleShardingSpec, ShardingPlan
from ._plan_report import PlanReport, plan_report
from ._planner import ShardingPlanner
from ._resolver import PlanOverrideResolver
from ._text_trainer import TextTrainer
from ._trainer import BaseTrainer, StepResult
from ._verify import Cause, Check, VerifyOptions, VerifyReport, verify_training
from ._window import Window
from ._yaml_file import ConfigError

__version__ = version("cp-trainer-glue")

__all__ = [
    "BaseTrainer",
    "Cause",
    "Check",
    "ConfigError",
    "Correction",
    "EvalResult",
    "HyperAutoModel",
    "Inspection",
    "MeshContext",
    "ModuleShardingSpec",
    "PlanOverrideResolver",
    "PlanReport",
    "Prediction",
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
