"""In an environment made from wheels alone: the package imports, ours are exactly those expected, others are absent."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys

OURS = ("cp-collectives", "cp-core", "cp-wrappers", "cp-models-qwen3moe", "cp-trainer-glue")


def faults(expected: list[str], absent: list[str]) -> list[str]:
    """Return one sentence for each thing that is wrong in this environment.

    Args:
        expected: Our packages that must be installed, all others must not; the last is the one under test.
        absent: Modules that must not be found.
    """
    installed = {name for name in OURS if _is_installed(name)}
    found = [f"{name} is not installed." for name in expected if name not in installed]
    found += [f"{name} came along with {expected[-1]}." for name in sorted(installed.difference(expected))]
    found += [f"module {name} came along with {expected[-1]}." for name in absent if importlib.util.find_spec(name)]
    module = importlib.import_module(expected[-1].replace("-", "_"))
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    found += [f"{module.__name__} has no {name}, which its __all__ lists." for name in missing]
    return found


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("expected", nargs="+")
    parser.add_argument("--absent", nargs="*", default=[])
    arguments = parser.parse_args()
    sys.exit("\n".join(faults(arguments.expected, arguments.absent)) or 0)
