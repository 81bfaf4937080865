"""Names of wrappers, and the resolution of what a user declares to a wrapper with its data."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from cp_core import ContextParallelStrategy, InvalidInputError

from ._inner_wrapper import CONTEXT_PARAMETERS, WrapperContract, contract_of
from ._targets import import_target

WrapperDeclaration = str | Mapping[str, Any] | Callable[..., Any]

_GROUP = "cp_wrappers.inner_wrappers"
_TARGET_KEY = "_target_"
# Names that a package brings which may not be installed.
_PACKAGE_OF_PREFIX = {"qwen3_moe_": "cp-models-qwen3moe"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedWrapper:
    """A wrapper function with its data arguments, checked."""

    # As the user declared it: a name, a path, or the function's own name.
    name: str
    function: Callable[..., Any]
    contract: WrapperContract
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def strategy(self) -> ContextParallelStrategy | None:
        """Return the wrapper's strategy, None if it brings its own communication."""
        return None if self.contract.strategy is None else self.contract.strategy(**self.arguments)


def inner_wrapper_names() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_registered()))


def resolve_inner_wrapper(declaration: WrapperDeclaration) -> ResolvedWrapper:
    """Find the wrapper that a declaration names and check its data arguments.

    Args:
        declaration: A registered name; a mapping with `_target_` (a name or a dotted path) and the wrapper's data; or a
            decorated function.

    Raises:
        InvalidInputError: If nothing has that name, the decorator is missing, or data arguments are unknown, missing
            or reserved.
    """
    target, arguments = _split(declaration)
    function = _find(target) if isinstance(target, str) else target
    name = target if isinstance(target, str) else getattr(target, "__name__", repr(target))
    contract = contract_of(function)
    if contract is None:
        raise InvalidInputError(
            f"{name!r} is not a wrapper: decorate the function with @inner_wrapper from cp_wrappers, so that its "
            "context parameters are checked."
        )
    _check_arguments(name, contract, arguments)
    return ResolvedWrapper(name=name, function=function, contract=contract, arguments=arguments)


def _split(declaration: WrapperDeclaration) -> tuple[str | Callable[..., Any], dict[str, Any]]:
    if isinstance(declaration, Mapping):
        target = declaration.get(_TARGET_KEY)
        if not isinstance(target, str):
            raise InvalidInputError(
                f"an inner_wrapper mapping needs {_TARGET_KEY}: a registered name or a dotted path; got keys "
                f"{sorted(map(str, declaration))}."
            )
        return target, {key: value for key, value in declaration.items() if key != _TARGET_KEY}
    if isinstance(declaration, str) or callable(declaration):
        return declaration, {}
    raise InvalidInputError(
        f"inner_wrapper must be a name, a mapping with {_TARGET_KEY} or a decorated function, but got "
        f"{type(declaration).__name__}."
    )


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def _find(target: str) -> Callable[..., Any]:
    names = _registered()
    if target in names:
        function: Callable[..., Any] = names[target].load()
        return function
    if "." in target:
        return import_target(target)
    for prefix, package in _PACKAGE_OF_PREFIX.items():
        if target.startswith(prefix) and not any(name.startswith(prefix) for name in names):
            raise InvalidInputError(f"inner_wrapper {target!r} comes with {package}, which is not installed here.")
    close = get_close_matches(target, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise InvalidInputError(f"no inner_wrapper is called {target!r}; registered are {', '.join(sorted(names))}.{hint}")


def _check_arguments(name: str, contract: WrapperContract, arguments: Mapping[str, Any]) -> None:
    reserved = sorted(set(arguments).intersection(CONTEXT_PARAMETERS))
    if reserved:
        raise InvalidInputError(
            f"inner_wrapper {name!r}: {', '.join(reserved)} is filled in at apply and cannot be given as data."
        )
    known = contract.data_parameters
    unknown = sorted(set(arguments).difference(known))
    missing = sorted(
        key for key, value in known.items() if value.default is inspect.Parameter.empty and key not in arguments
    )
    if unknown or missing:
        raise InvalidInputError(
            f"inner_wrapper {name!r} takes {', '.join(sorted(known)) or 'no data arguments'}; unknown: "
            f"{', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}."
        )
