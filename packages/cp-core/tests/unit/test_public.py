"""The package offers what it says."""

import subprocess
import sys
import types

import cp_collectives
import cp_core


def public_names(module: types.ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "version"
    }


def test_public_names_are_what_all_says() -> None:
    assert public_names(cp_core) | {"cost"} == set(cp_core.__all__)


def test_all_is_sorted() -> None:
    assert cp_core.__all__ == sorted(cp_core.__all__)


def test_errors_are_those_of_the_layer_below() -> None:
    for name in ("ContextParallelError", "InvalidInputError", "LifecycleError", "PeerError", "UnsupportedError"):
        assert getattr(cp_core, name) is getattr(cp_collectives, name)
    assert cp_core.flex_cp_allgather is cp_collectives.flex_cp_allgather


def test_importing_the_package_imports_nothing_of_a_model_or_trainer() -> None:
    absent = ("transformers", "pydantic", "yaml", "cp_wrappers", "pytest")
    code = f"import sys, cp_core; sys.exit(any(name in sys.modules for name in {absent!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
