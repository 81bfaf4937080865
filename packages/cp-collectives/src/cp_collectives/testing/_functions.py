"""Name a module-level function in one process and find it again in another, also where its file is not importable.

Test files that pytest loads with `--import-mode=importlib` have a module name that no other process can import, so such
a function travels as file and qualified name, and the file is loaded under the same module name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionReference:
    """Where a module-level function is found."""

    module: str
    qualified_name: str
    file: str | None  # None: the module is imported by its name

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionReference:
        """Return the reference of `function`.

        Raises:
            ValueError: Another process cannot find `function` by name: a lambda, a nested function, a partial.
        """
        module = sys.modules.get(getattr(function, "__module__", ""))
        qualified_name = getattr(function, "__qualname__", repr(function))
        if module is None or not _is_found(module, qualified_name, function):
            raise ValueError(
                f"Ranks need a module-level function, which they can find by name, but got {qualified_name}; "
                "move it to the top of its module and pass what it needs as arguments."
            )
        file = None if _is_importable(module) else module.__file__
        return cls(module=module.__name__, qualified_name=qualified_name, file=file)


class FunctionLoader:
    """Finds referenced functions in this process; a file is loaded once, and again when it has changed."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[int, ModuleType]] = {}

    def load(self, reference: FunctionReference) -> Callable[..., Any]:
        """Return the function that `reference` names, and leave its module in `sys.modules`."""
        if reference.file is None:
            module = importlib.import_module(reference.module)
        else:
            module = self._load_file(reference.module, reference.file)
        function: Callable[..., Any] = attrgetter(reference.qualified_name)(module)
        return function

    def _load_file(self, name: str, file: str) -> ModuleType:
        modified = Path(file).stat().st_mtime_ns
        loaded_at, module = self._loaded.get(file, (None, None))
        if module is None or loaded_at != modified:
            module = _execute_file(name, file)
            self._loaded[file] = (modified, module)
        return module


def _execute_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"Ranks need a Python source file, but got {file}; move the function to a .py file.")
    module = importlib.util.module_from_spec(spec)
    # Pickled arguments refer to their classes by this name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_found(module: ModuleType, qualified_name: str, function: Callable[..., Any]) -> bool:
    try:
        return attrgetter(qualified_name)(module) is function
    except AttributeError:
        return False


def _is_importable(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    # A spawned process has the parent's main module as its own, so that one is found by name too.
    if file is None or module.__name__ == "__main__":
        return True
    relative = Path(*module.__name__.split("."))
    candidates = (relative.with_suffix(".py"), relative / "__init__.py")
    return any(Path(entry).absolute() / candidate == Path(file) for entry in sys.path for candidate in candidates)
