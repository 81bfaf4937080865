"""What is known of a model family: where its attentions are. A spec cannot choose a method."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from cp_core import InvalidInputError

_GROUP = "cp_wrappers.model_specs"

BatchPrepare = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model family."""

    # `config.model_type` of the family.
    architecture: str
    # fnmatch patterns of full module names; `*` crosses dots.
    attention_targets: tuple[str, ...]
    # Completes a global batch before it is sharded.
    batch_prepare_fn: BatchPrepare | None = None
    # Names of wrappers made for this family, for messages and plans.
    wrappers: tuple[str, ...] = ()


class _Specs:
    """Registered specs by architecture; filled by packages' entry points and by `register_cp_model_spec`."""

    def __init__(self) -> None:
        self._by_architecture: dict[str, ModelSpec] = {}

    def add(self, spec: ModelSpec) -> None:
        known = self._by_architecture.setdefault(spec.architecture, spec)
        if known != spec:
            raise InvalidInputError(
                f"architecture {spec.architecture!r} has a different model spec already; register it once."
            )

    def get(self, architecture: str | None) -> ModelSpec | None:
        _load_entry_points()
        return None if architecture is None else self._by_architecture.get(architecture)


_specs = _Specs()


def register_cp_model_spec(
    *,
    architecture: str,
    attention_targets: tuple[str, ...],
    batch_prepare_fn: BatchPrepare | None = None,
    wrappers: tuple[str, ...] = (),
) -> ModelSpec:
    """Describe a model family whose attentions are not found by looking at the modules.

    Args:
        architecture: `config.model_type`.
        attention_targets: fnmatch patterns of full module names, for example `("*.self_attn",)`.
        batch_prepare_fn: Completes a global batch before it is sharded.
        wrappers: Names of the family's own wrappers. Listed, never chosen: the user declares the method.

    Returns:
        The spec.

    Raises:
        InvalidInputError: If the architecture has a different spec, or no targets are given.
    """
    for name, value in (("attention_targets", attention_targets), ("wrappers", wrappers)):
        if isinstance(value, str):
            raise InvalidInputError(
                f"{name} of the model spec of {architecture!r} must be a tuple, such as ({value!r},)."
            )
    if not attention_targets:
        raise InvalidInputError(f"the model spec of {architecture!r} names no attention_targets.")
    spec = ModelSpec(
        architecture=architecture,
        attention_targets=tuple(attention_targets),
        batch_prepare_fn=batch_prepare_fn,
        wrappers=tuple(wrappers),
    )
    _specs.add(spec)
    return spec


def model_spec(architecture: str | None) -> ModelSpec | None:
    """Return the spec of an architecture, None if nobody registered one."""
    return _specs.get(architecture)


@cache
def _load_entry_points() -> None:
    """Let each installed package register its spec, once per process."""
    for entry in entry_points(group=_GROUP):
        entry.load()()
