"""The contract of a wrapper function: five context parameters, named data, and the method it stands for."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from cp_core import AttentionShape, ContextParallelStrategy, InvalidInputError

CONTEXT_PARAMETERS = ("target_module", "mesh", "tp_mesh", "cp_mesh", "ep_mesh")

_CONTRACT_ATTRIBUTE = "__inner_wrapper__"

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])
StrategyFactory = Callable[..., ContextParallelStrategy]
ModuleCheck = Callable[..., None]
ShapeReader = Callable[..., AttentionShape | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapperContract:
    """What a decorated wrapper says of itself; it travels with the function."""

    # The wrapper's own data, by name, with the default where there is one.
    data_parameters: Mapping[str, inspect.Parameter]
    # Makes the strategy from the wrapper's data; None for a wrapper that brings its own communication.
    strategy: StrategyFactory | None
    # Refuses a module that the wrapper cannot serve, given the module, its name and the wrapper's data.
    check: ModuleCheck | None = None
    # Reads the heads of a module, given the same and `device`; None reads the module's transformers config.
    shape: ShapeReader | None = None


@overload
def inner_wrapper(function: Wrapper, /) -> Wrapper: ...
@overload
def inner_wrapper(
    *, strategy: StrategyFactory | None = None, check: ModuleCheck | None = None, shape: ShapeReader | None = None
) -> Callable[[Wrapper], Wrapper]: ...
def inner_wrapper(
    function: Wrapper | None = None,
    /,
    *,
    strategy: StrategyFactory | None = None,
    check: ModuleCheck | None = None,
    shape: ShapeReader | None = None,
) -> Wrapper | Callable[[Wrapper], Wrapper]:
    """Mark a function as an attention wrapper and check its signature at import.

    The function takes `target_module, mesh, tp_mesh, cp_mesh, ep_mesh` without defaults; every further named parameter
    is its data, given beside `_target_` or the name. It returns a replacement for `target_module.forward`, or installs
    one itself and returns None.

    Args:
        function: The wrapper, when used without parentheses.
        strategy: Makes the wrapper's strategy from its data arguments, so that padding, checks and costs are known
            before the first forward. Leave it out for a wrapper with communication of its own.
        check: Called with a module, its name, and the wrapper's data by name before anything is wrapped; raises a
            `ContextParallelError` if the wrapper cannot serve the module.
        shape: Called with the same and `device` (None is where the parameters are); returns the heads that the strategy
            works on, None where they show at the first forward only. Left out, they are read from the config of a
            transformers model.

    Raises:
        InvalidInputError: If a context parameter is missing or has a default, or parameters are collected with `*` or
            `**`.

    Example:
        >>> @inner_wrapper
        ... def my_wrapper(target_module, mesh, tp_mesh, cp_mesh, ep_mesh, chunks=2):
        ...     original = target_module.forward
        ...     return lambda *args, **kwargs: original(*args, **kwargs)
    """

    def mark(wrapper: Wrapper) -> Wrapper:
        contract = WrapperContract(
            data_parameters=data_parameters(wrapper), strategy=strategy, check=check, shape=shape
        )
        setattr(wrapper, _CONTRACT_ATTRIBUTE, contract)
        return wrapper

    return mark if function is None else mark(function)


def contract_of(function: object) -> WrapperContract | None:
    """Return the contract of a decorated function, None where the decorator is missing."""
    contract = getattr(function, _CONTRACT_ATTRIBUTE, None)
    return contract if isinstance(contract, WrapperContract) else None


def data_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function beside the five context parameters: its data, by name.

    Raises:
        InvalidInputError: If a context parameter is missing or has a default, or parameters are collected with `*` or
            `**`.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(
            f"{name} has no parameters that can be read; use a function with {', '.join(CONTEXT_PARAMETERS)}."
        ) from error
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise InvalidInputError(f"{name} must be a plain function, not an async one or a generator.")
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]
    if positional:
        raise InvalidInputError(f"{name} must take {', '.join(positional)} by name, not by position only.")
    collected = [str(p) for p in parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if collected:
        raise InvalidInputError(
            f"{name} collects parameters with {', '.join(collected)}; name each data parameter, so that a misspelt one "
            "is an error."
        )
    empty = inspect.Parameter.empty
    missing = [context for context in CONTEXT_PARAMETERS if context not in parameters]
    defaulted = [c for c in CONTEXT_PARAMETERS if c in parameters and parameters[c].default is not empty]
    if missing or defaulted:
        raise InvalidInputError(
            f"{name} must take {', '.join(CONTEXT_PARAMETERS)} without defaults; missing: "
            f"{', '.join(missing) or 'none'}; with a default: {', '.join(defaulted) or 'none'}."
        )
    return {key: value for key, value in parameters.items() if key not in CONTEXT_PARAMETERS}
