"""What the forward of a module calls, as far as its code shows: a gate before the first forward, not a proof."""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

SDPA_NAME = "scaled_dot_product_attention"
# Their modules attend through functions that others choose; what these call says nothing of the caller.
_NOT_READ = frozenset({"torch", "transformers"})


def calls_sdpa(module: torch.nn.Module) -> bool:
    """Whether a module's forward calls `F.scaled_dot_product_attention` itself.

    Its own methods and functions of its package are followed as far as they go, functions of other packages are looked
    at without following them. Modules inside it are not: they have forwards of their own.
    """
    own_package = _package_of(type(module))
    if own_package in _NOT_READ:
        return False
    waiting = [function for kind in type(module).__mro__ for function in _functions_of(kind.__dict__.get("forward"))]
    waiting += _functions_of(module.__dict__.get("forward"))
    seen: set[types.CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen or _package_of(function) in _NOT_READ:
            continue
        seen.add(function.__code__)
        names = set(_names_in(function.__code__))
        called = list(_named_objects(function, module, names))
        if SDPA_NAME in names or any(value is torch.nn.functional.scaled_dot_product_attention for value in called):
            return True
        if _package_of(function) == own_package:
            waiting += [inner for value in called for inner in _functions_of(value)]
    return False


def _package_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _functions_of(value: object) -> list[types.FunctionType]:
    """Return the function behind a method, a partial application or a decoration."""
    if isinstance(value, property):
        return _functions_of(value.fget)
    if isinstance(value, functools.partial):
        return _functions_of(value.func)
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        return _functions_of(value.__func__)
    plain = inspect.unwrap(value) if callable(value) else value
    return [plain] if isinstance(plain, types.FunctionType) else []


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and those defined in it use from outside."""
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _named_objects(function: types.FunctionType, module: torch.nn.Module, names: set[str]) -> Iterator[object]:
    """Yield what the names in a function may stand for: of its file, its closure, the module and its classes."""
    scopes = [module.__dict__, *(kind.__dict__ for kind in type(module).__mro__)]
    for name in names.intersection(function.__globals__):
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):  # helpers.attend(...): both names are there
            scopes.append(vars(value))
        else:
            yield value
    for scope in scopes:
        yield from (scope[name] for name in names.intersection(scope))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
