"""Names of wrappers, and the resolution of what a user declares to a method with its data."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from cp_core import ContextParallelStrategy, InvalidInputError

from ._inner_wrapper import CONTEXT_PARAMETERS, WrapperContract, contract_of, data_parameters
from ._targets import failure_in, import_target

# What a user may write where a wrapper or a compute function is declared.
WrapperDeclaration = str | Mapping[str, Any] | Callable[..., Any]
Channel = Literal["inner_wrapper", "local_compute_fn"]

_GROUP = "cp_wrappers.inner_wrappers"
_TARGET_KEY = "_target_"
# Names that a package brings which may not be installed.
_PACKAGE_OF_PREFIX = {"qwen3_moe_": "cp-models-qwen3moe"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedWrapper:
    """A wrapper function, or a factory of a local computation, with its data arguments, checked."""

    # As the user declared it: a name, a path, or the function's own name.
    name: str
    function: Callable[..., Any]
    contract: WrapperContract
    arguments: Mapping[str, Any] = field(default_factory=dict)
    channel: Channel = "inner_wrapper"

    def strategy(self) -> ContextParallelStrategy | None:
        """Return the wrapper's strategy, None if it brings its own communication."""
        return None if self.contract.strategy is None else self.contract.strategy(**self.arguments)


class _Registered:
    """Wrappers that this process registered by name, beside those of packages' entry points."""

    def __init__(self) -> None:
        self._by_name: dict[str, Callable[..., Any]] = {}

    def add(self, name: str, function: Callable[..., Any]) -> None:
        if name in _entry_points() or self._by_name.get(name, function) is not function:
            raise InvalidInputError(f"an inner_wrapper called {name!r} is registered already; choose another name.")
        self._by_name[name] = function

    def names(self) -> set[str]:
        return {*self._by_name, *_entry_points()}

    def load(self, name: str) -> Callable[..., Any]:
        if name in self._by_name:
            return self._by_name[name]
        try:
            function: Callable[..., Any] = _entry_points()[name].load()
        except ImportError as error:
            raise InvalidInputError(f"inner_wrapper {name!r} cannot be loaded: {failure_in(error)}") from error
        return function


_registered = _Registered()


def register_inner_wrapper(name: str, wrapper: Callable[..., Any]) -> None:
    """Give a decorated wrapper a name that declarations can use, in this process.

    Packages register theirs in the entry-point group `cp_wrappers.inner_wrappers`, which needs no call.

    Args:
        name: The name.
        wrapper: A function under `@inner_wrapper`.

    Raises:
        InvalidInputError: If the name is taken, or looks like a path, or the function lacks the decorator.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise InvalidInputError(f"the name of an inner_wrapper must be an identifier, but is {name!r}.")
    _require_contract(name, wrapper)
    _registered.add(name, wrapper)


def inner_wrapper_names() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_registered.names()))


def resolve_inner_wrapper(declaration: WrapperDeclaration) -> ResolvedWrapper:
    """Find the wrapper that a declaration names and check its data arguments.

    Args:
        declaration: A registered name or a dotted path; a mapping with `_target_` (a name or a path) and the wrapper's
            data; or a decorated function.

    Raises:
        InvalidInputError: If nothing has that name, the decorator is missing, or data arguments are unknown, missing
            or reserved.
    """
    target, arguments = _split(declaration, "inner_wrapper")
    function = _find(target) if isinstance(target, str) else target
    name = _name_of(target)
    contract = _require_contract(name, function)
    _check_arguments(f"inner_wrapper {name!r}", contract.data_parameters, arguments)
    return ResolvedWrapper(name=name, function=function, contract=contract, arguments=arguments)


def resolve_local_compute_fn(declaration: WrapperDeclaration) -> ResolvedWrapper:
    """Find the factory that a declaration names and check its data arguments.

    A factory takes the five context parameters of a wrapper, without the decorator, and returns the callable that
    computes in place of the module's forward, on this rank's own tensors.

    Args:
        declaration: A dotted path; a mapping with `_target_` (a path) and the factory's data; or the factory.

    Raises:
        InvalidInputError: If there is no such callable, it is a wrapper, or its parameters or data do not fit.
    """
    target, arguments = _split(declaration, "local_compute_fn")
    name = _name_of(target)
    if isinstance(target, str) and target not in _registered.names():
        function = import_target(target)
    else:
        function = _find(target) if isinstance(target, str) else target
    if contract_of(function) is not None:
        raise InvalidInputError(f"local_compute_fn {name!r} is an inner_wrapper; declare it as inner_wrapper: {name}.")
    data = data_parameters(function)
    _check_arguments(f"local_compute_fn {name!r}", data, arguments)
    contract = WrapperContract(data_parameters=data, strategy=None)
    return ResolvedWrapper(
        name=name, function=function, contract=contract, arguments=arguments, channel="local_compute_fn"
    )


def plain(value: object) -> object:
    """Return data that ranks, or declarations, can be compared by: values as they are, objects by their type's name."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _require_contract(name: str, function: Callable[..., Any]) -> WrapperContract:
    contract = contract_of(function)
    if contract is None:
        raise InvalidInputError(
            f"{name!r} is not a wrapper: decorate the function with @inner_wrapper from cp_wrappers, so that its "
            "context parameters are checked; or declare it as local_compute_fn, if it returns a local computation."
        )
    return contract


def _split(declaration: WrapperDeclaration, channel: Channel) -> tuple[str | Callable[..., Any], dict[str, Any]]:
    if isinstance(declaration, Mapping):
        target = declaration.get(_TARGET_KEY)
        if not isinstance(target, str):
            raise InvalidInputError(
                f"a mapping under {channel} needs {_TARGET_KEY}: a registered name or a dotted path; got keys "
                f"{', '.join(sorted(map(str, declaration))) or 'none'}."
            )
        return target, {str(key): value for key, value in declaration.items() if key != _TARGET_KEY}
    if isinstance(declaration, str) or callable(declaration):
        return declaration, {}
    raise InvalidInputError(
        f"{channel} must be a name, a mapping with {_TARGET_KEY} or a function, but got {type(declaration).__name__}."
    )


def _name_of(target: str | Callable[..., Any]) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", type(target).__name__))


def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def _find(target: str) -> Callable[..., Any]:
    names = _registered.names()
    if target in names:
        return _registered.load(target)
    if "." in target:
        return import_target(target)
    for prefix, package in _PACKAGE_OF_PREFIX.items():
        if target.startswith(prefix) and not any(name.startswith(prefix) for name in names):
            raise InvalidInputError(
                f"inner_wrapper {target!r} comes with {package}, and no installed version of it has it."
            )
    raise InvalidInputError(
        f"no inner_wrapper is called {target!r}; registered are {', '.join(sorted(names))}.{_nearest(target, names)}"
    )


def _check_arguments(subject: str, known: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> None:
    reserved = sorted(set(arguments).intersection(CONTEXT_PARAMETERS))
    if reserved:
        raise InvalidInputError(f"{subject}: {', '.join(reserved)} is filled in at apply and cannot be given as data.")
    unknown = sorted(set(arguments).difference(known))
    empty = inspect.Parameter.empty
    missing = sorted(key for key, value in known.items() if value.default is empty and key not in arguments)
    if unknown or missing:
        hint = _nearest(unknown[0], known) if unknown else ""
        raise InvalidInputError(
            f"{subject} takes {', '.join(sorted(known)) or 'no data arguments'}; unknown: "
            f"{', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}.{hint}"
        )


def _nearest(name: str, choices: Iterable[str]) -> str:
    close = get_close_matches(name, list(choices), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
