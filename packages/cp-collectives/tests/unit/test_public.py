"""The package offers what it says."""

import subprocess
import sys
import types

import cp_collectives
import cp_collectives.testing


def public_names(module: types.ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "version"
    }


def test_public_names_are_what_all_says() -> None:
    assert public_names(cp_collectives) == set(cp_collectives.__all__)


def test_all_is_sorted() -> None:
    assert cp_collectives.__all__ == sorted(cp_collectives.__all__)


def test_public_names_of_testing_are_what_all_says() -> None:
    assert public_names(cp_collectives.testing) == set(cp_collectives.testing.__all__)


def test_importing_the_package_needs_neither_the_harness_nor_what_only_higher_layers_need() -> None:
    absent = ("cp_collectives.testing", "pytest", "transformers", "pydantic", "yaml")
    code = f"import sys, cp_collectives; sys.exit(any(name in sys.modules for name in {absent!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
