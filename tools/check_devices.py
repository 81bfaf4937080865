"""Devices and backends are named in the platform table and in the kernels, and nowhere else."""

import re
import sys
from pathlib import Path

_ALLOWED = ("cp_collectives/_platform.py", "cp_collectives/_control.py", "cp_collectives/testing/", "cp_core/kernels/")
_NAMES = re.compile(r"torch\.(cuda|npu)\b|torch_npu|[\"'](nccl|hccl|gloo)[\"']")


def faults(root: Path) -> list[str]:
    """Return `file:line: text` of every line of our sources that names a device or a backend.

    Args:
        root: The checkout.
    """
    found = []
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        if any(allowed in path.as_posix() for allowed in _ALLOWED):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if _NAMES.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(faults(Path(__file__).parents[1])) or 0)
