"""From a dotted path to the callable it names."""

import importlib
import importlib.util
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from cp_core import InvalidInputError

_ALIAS_GROUP = "cp_wrappers.target_aliases"


def import_target(path: str) -> Callable[..., Any]:
    """Return the callable at `package.module.name`.

    A path that an installed package claims in the entry-point group `cp_wrappers.target_aliases` resolves to that
    package's callable, unless the module of the path is really installed.

    Raises:
        InvalidInputError: If the module or the name in it is not found, or it is not callable.
    """
    module_path, _, name = path.rpartition(".")
    if not module_path:
        raise InvalidInputError(
            f"_target_ {path!r} is neither a registered name nor a path such as package.module.name."
        )
    aliases = {entry.name: entry for entry in entry_points(group=_ALIAS_GROUP)}
    if path in aliases and not _is_installed(module_path):
        target: Any = aliases[path].load()
    else:
        target = _import_attribute(path, module_path, name)
    if not callable(target):
        raise InvalidInputError(f"_target_ {path!r} is a {type(target).__name__}, not a callable.")
    return target  # type: ignore[no-any-return]  # any callable; its contract is checked next


def _is_installed(module_path: str) -> bool:
    return importlib.util.find_spec(module_path.partition(".")[0]) is not None


def _import_attribute(path: str, module_path: str, name: str) -> Any:
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise InvalidInputError(
            f"_target_ {path!r}: cannot import module {module_path!r} ({error}); install its package or put it on "
            "PYTHONPATH on every rank."
        ) from error
    if not hasattr(module, name):
        raise InvalidInputError(f"_target_ {path!r}: module {module_path!r} has no {name!r}.")
    return getattr(module, name)
