"""How context-parallel methods meet attention modules: declared per module, checked together, applied and removed.

Modules, lowest first: `_inner_wrapper`, `_targets`, `_faults`, `_names`, `_forward_code`, `_mask_functions`,
`_attention_settings`, `_sdpa_calls`, `_registry`, `_model_spec`, `_boundaries`, `_boundary`, `_entries`,
`_whole_sequence`, `_sdpa_forwards`, `_one_rank`, `_transformers` (the only one that imports transformers),
`_sdpa_modules`, `_declaration`, `_methods`, `_reach`, `_check`, `_suggestion`, `wrappers`, `_install`, `_apply`.
"""

from importlib.metadata import version

from ._apply import apply_context_parallel
from ._boundaries import attention_shape, find_attention_boundaries
from ._boundary import layout_given_to
from ._check import DeclarationCheck, check_declarations, check_methods, plan_boundaries
from ._declaration import BoundaryPlan, MethodDeclaration
from ._faults import Fault
from ._inner_wrapper import CONTEXT_PARAMETERS, WrapperContract, inner_wrapper
from ._install import AppliedContextParallel, BoundaryReport, Meshes, install_boundaries
from ._methods import MethodVerdict, judge_methods, split_heads
from ._model_spec import ModelSpec, model_spec, register_cp_model_spec
from ._registry import (
    ResolvedWrapper,
    WrapperDeclaration,
    inner_wrapper_names,
    register_inner_wrapper,
    resolve_inner_wrapper,
    resolve_local_compute_fn,
)
from ._suggestion import Suggestion, suggest_declarations

__version__ = version("cp-wrappers")

__all__ = [
    "CONTEXT_PARAMETERS",
    "AppliedContextParallel",
    "BoundaryPlan",
    "BoundaryReport",
    "DeclarationCheck",
    "Fault",
    "Meshes",
    "MethodDeclaration",
    "MethodVerdict",
    "ModelSpec",
    "ResolvedWrapper",
    "Suggestion",
    "WrapperContract",
    "WrapperDeclaration",
    "apply_context_parallel",
    "attention_shape",
    "check_declarations",
    "check_methods",
    "find_attention_boundaries",
    "inner_wrapper",
    "inner_wrapper_names",
    "install_boundaries",
    "judge_methods",
    "layout_given_to",
    "model_spec",
    "plan_boundaries",
    "register_cp_model_spec",
    "register_inner_wrapper",
    "resolve_inner_wrapper",
    "resolve_local_compute_fn",
    "split_heads",
    "suggest_declarations",
]
