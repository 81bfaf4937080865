"""From a dotted path to the callable it names."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from cp_core import ContextParallelError, InvalidInputError

_ALIAS_GROUP = "cp_wrappers.target_aliases"


def import_target(path: str) -> Callable[..., Any]:
    """Return the callable at `package.module.name`.

    A path that an installed package claims in the entry-point group `cp_wrappers.target_aliases` resolves to that
    package's callable, unless the module of the path is really installed.

    Raises:
        InvalidInputError: If the module or the name in it is not found, importing it fails, or it is not callable.
    """
    module_path, _, name = path.rpartition(".")
    if not module_path or not all(path.split(".")):
        raise InvalidInputError(f"{path!r} is neither a registered name nor a path such as package.module.name.")
    aliases = {entry.name: entry for entry in entry_points(group=_ALIAS_GROUP)}
    if _is_installed(module_path):
        target: Any = _import_attribute(path, module_path, name)
    elif path in aliases:
        target = aliases[path].load()
    else:
        raise InvalidInputError(_not_found(path, module_path, aliases))
    if not callable(target):
        raise InvalidInputError(f"{path!r} is a {type(target).__name__}, not a callable.")
    return target  # type: ignore[no-any-return]  # any callable; its contract is checked next


# What may come out of code that is not ours; Ctrl-C is the user's own.
FOREIGN_FAILURES = (Exception, SystemExit)


def failure_in(error: BaseException) -> str:
    """Describe an exception of code that is not ours in one line: its kind, its words, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    try:
        words = str(error).strip()
    except Exception:  # an exception that cannot even say what it is
        words = ""
    return type(error).__name__ + (f": {words}" if words else "") + where


def fault_in(
    action: Callable[[], object], *, what: str = "context parallelism could not be set up"
) -> ContextParallelError | None:
    """Run something that users' code takes part in, and return its fault for all ranks to agree on.

    Args:
        action: What to run.
        what: What an exception that is not ours means, for the sentence.
    """
    try:
        action()
    except ContextParallelError as error:
        return error
    except FOREIGN_FAILURES as error:
        return InvalidInputError(f"{what}: {failure_in(error)}")
    return None


def _is_installed(module_path: str) -> bool:
    if module_path in sys.modules:
        return True
    try:
        return importlib.util.find_spec(module_path) is not None
    except ModuleNotFoundError:
        return False
    except FOREIGN_FAILURES as error:  # a parent package of the user's fails to import
        raise InvalidInputError(f"importing {module_path!r} failed: {failure_in(error)}") from error


def _import_attribute(path: str, module_path: str, name: str) -> Any:
    try:
        module = importlib.import_module(module_path)
    except ContextParallelError as error:  # a decorator of ours refused something in it
        raise InvalidInputError(f"importing {module_path!r} failed: {error}") from error
    except FOREIGN_FAILURES as error:
        raise InvalidInputError(f"importing {module_path!r} failed: {failure_in(error)}") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise InvalidInputError(f"{path!r}: module {module_path!r} has no {name!r}.") from error
    except FOREIGN_FAILURES as error:  # a module may compute its attributes
        raise InvalidInputError(f"{path!r}: looking it up failed: {failure_in(error)}") from error


def _not_found(path: str, module_path: str, aliases: dict[str, Any]) -> str:
    siblings = sorted(alias for alias in aliases if alias.partition(".")[0] == path.partition(".")[0])
    if siblings:
        return (
            f"{path!r} names a wrapper that no installed package has; of these paths there are {', '.join(siblings)}."
        )
    return (
        f"{path!r}: there is no module {module_path!r}; install its package, or start in the folder that holds it, on "
        "every rank."
    )
