"""How context-parallel methods meet attention modules: declared per module, checked together, applied and removed.

Modules, lowest first: `_inner_wrapper`, `_targets`, `_registry`, `_model_spec`, `_boundaries`, `_boundary`,
`_declaration`, `_transformers` (the only one that imports transformers), `wrappers`, `_apply`.
"""

from importlib.metadata import version

from ._apply import AppliedContextParallel, BoundaryReport, Meshes, apply_context_parallel, install_boundaries
from ._boundaries import attention_shape, find_attention_boundaries
from ._declaration import BoundaryPlan, MethodDeclaration, plan_boundaries
from ._inner_wrapper import CONTEXT_PARAMETERS, WrapperContract, inner_wrapper
from ._model_spec import ModelSpec, model_spec, register_cp_model_spec
from ._registry import ResolvedWrapper, WrapperDeclaration, inner_wrapper_names, resolve_inner_wrapper

__version__ = version("cp-wrappers")

__all__ = [
    "CONTEXT_PARAMETERS",
    "AppliedContextParallel",
    "BoundaryPlan",
    "BoundaryReport",
    "Meshes",
    "MethodDeclaration",
    "ModelSpec",
    "ResolvedWrapper",
    "WrapperContract",
    "WrapperDeclaration",
    "apply_context_parallel",
    "attention_shape",
    "find_attention_boundaries",
    "inner_wrapper",
    "inner_wrapper_names",
    "install_boundaries",
    "model_spec",
    "plan_boundaries",
    "register_cp_model_spec",
    "resolve_inner_wrapper",
]
