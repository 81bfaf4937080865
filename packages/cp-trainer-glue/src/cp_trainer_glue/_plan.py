"""What is to be done to each module: the user's intent and the plan made of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from cp_wrappers import BoundaryPlan, MethodDeclaration, Suggestion

from ._placements import BoundaryPlacements
from ._tensor_parallel_plan import TensorParallelPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleShardingSpec:
    """How the attentions that a pattern reaches are sharded; one entry of `plan_overrides` without its `match`.

    Exactly one of `inner_wrapper` and `local_compute_fn` names the method.
    """

    # The attention, relative to the matched module; "self" is that module. None: the only attention in it.
    inner_target: str | None = None
    # A registered name or a dotted path, a mapping with `_target_` and the wrapper's data, or a decorated function.
    inner_wrapper: str | Mapping[str, Any] | Callable[..., Any] | None = None
    # A dotted path, a mapping with `_target_` and the factory's data, or a factory.
    local_compute_fn: str | Mapping[str, Any] | Callable[..., Any] | None = None
    # Must be false under context parallelism: a declarative boundary would communicate a second time.
    region_dispatch: bool | None = None
    # Where what the attention is given, and what it returns, lies on each axis of the mesh, such as
    # `{"cp": "shard(1)"}`; over what the method says. Checked under `sharding_mode: validate`.
    input_placements: Mapping[str, str] | None = None
    output_placements: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedOverride:
    """One entry of `plan_overrides` that holds in this run."""

    match: str
    spec: ModuleShardingSpec
    # Where it stands, for example "plan_overrides.0".
    source: str

    def declaration(self) -> MethodDeclaration:
        """Return it as cp-wrappers reads it."""
        return MethodDeclaration(
            match=self.match,
            inner_target=self.spec.inner_target,
            inner_wrapper=self.spec.inner_wrapper,
            local_compute_fn=self.spec.local_compute_fn,
            source=self.source,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """The checked plan of one model; nothing has been applied."""

    # The spec of each attention that gets a method, by module name.
    module_specs: Mapping[str, ModuleShardingSpec] = field(default_factory=dict)
    # One per attention that gets a method, in the model's order.
    boundaries: tuple[BoundaryPlan, ...] = ()
    # Where the tensors at each of them lie, by module name.
    placements: Mapping[str, BoundaryPlacements] = field(default_factory=dict)
    cp_size: int = 1
    # None without tensor parallelism.
    tensor_parallel: TensorParallelPlan | None = None


def entries_of(suggestion: Suggestion, *, always: Sequence[object] = ()) -> list[dict[str, Any]] | None:
    """Return suggested declarations as entries of `plan_overrides`; None if YAML cannot say one of them.

    Args:
        suggestion: What fits the model.
        always: Methods that the user declared without `when`.
    """
    try:
        return [_entry(declaration, always) for declaration in suggestion.declarations]
    except ValueError:
        return None


def as_yaml(content: Mapping[str, Any]) -> str:
    """Return a mapping as YAML in the order of its keys."""
    text: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
    return text.rstrip()


def _entry(declaration: MethodDeclaration, always: Sequence[object]) -> dict[str, Any]:
    method = declaration.inner_wrapper or declaration.local_compute_fn
    entry = {
        "match": declaration.match,
        "when": None if method in always else "cp",
        "region_dispatch": False,
        "inner_target": declaration.inner_target,
        "inner_wrapper": _plain(declaration.inner_wrapper),
        "local_compute_fn": _plain(declaration.local_compute_fn),
    }
    return {key: value for key, value in entry.items() if value is not None}


def _plain(method: Any) -> Any:
    """Return a function by its path, data as it is; ValueError for what has no name or is no plain data."""
    if callable(method):
        path = f"{method.__module__}.{getattr(method, '__qualname__', '<object>')}"
        if "<" in path:
            raise ValueError(path)
        return path
    if isinstance(method, Mapping):
        try:
            yaml.safe_dump(dict(method))
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
        return dict(method)
    return method
