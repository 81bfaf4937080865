"""What is to be done to each module: the user's intent and the plan made of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cp_wrappers import BoundaryPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleShardingSpec:
    """How the attentions that a pattern reaches are sharded; one entry of `plan_overrides` without its `match`.

    Exactly one of `inner_wrapper` and `local_compute_fn` names the method.
    """

    # The attention, relative to the matched module; "self" is that module. None: the only attention in it.
    inner_target: str | None = None
    # A registered name, or a mapping with `_target_` and the wrapper's data.
    inner_wrapper: str | Mapping[str, Any] | None = None
    local_compute_fn: str | Mapping[str, Any] | None = None
    # Must be false under context parallelism: a declarative boundary would communicate a second time.
    region_dispatch: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """The checked plan of one model; nothing has been applied."""

    # By pattern, as declared.
    module_specs: Mapping[str, ModuleShardingSpec] = field(default_factory=dict)
    # One per attention, in the model's order; empty at cp size 1.
    boundaries: tuple[BoundaryPlan, ...] = ()
    cp_size: int = 1
