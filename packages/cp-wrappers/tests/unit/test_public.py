"""The package offers what it says."""

import sys
import types

import cp_wrappers
import cp_wrappers.wrappers


def public_names(module: types.ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "version"
    }


def test_public_names_are_what_all_says() -> None:
    assert public_names(cp_wrappers) == set(cp_wrappers.__all__)


def test_importing_the_package_does_not_import_transformers() -> None:
    import subprocess

    code = "import sys, cp_wrappers, cp_wrappers.wrappers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_built_in_wrapper_is_registered_under_its_name() -> None:
    for name in cp_wrappers.wrappers.__all__:
        registered = cp_wrappers.resolve_inner_wrapper(name.removesuffix("_cp_wrapper"))
        assert registered.function is getattr(cp_wrappers.wrappers, name)
