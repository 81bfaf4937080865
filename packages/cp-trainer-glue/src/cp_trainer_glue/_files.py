"""The files that globs of a config name."""

from collections.abc import Sequence
from glob import glob
from pathlib import Path

from cp_core import InvalidInputError


def matching_files(patterns: Sequence[str], *, place: str) -> list[Path]:
    """Return the files that any of the globs matches, sorted.

    Args:
        patterns: The globs.
        place: The section of the config that has them.

    Raises:
        InvalidInputError: If a glob matches no file.
    """
    paths: set[Path] = set()
    for pattern in patterns:
        matched = {path for name in glob(pattern, recursive=True) if (path := Path(name)).is_file()}
        if not matched:
            raise InvalidInputError(f"{place}.files: {pattern!r} matches no file (relative to {Path.cwd()}).")
        paths |= matched
    return sorted(paths)
