"""Where commands write: a terminal or a pipe, and files for programs."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from cp_core import InvalidInputError

STANDARD_OUTPUT = "-"
_WIDTH_WITHOUT_TERMINAL = 160


def console() -> Console:
    """Return what to print on; wide where nobody's terminal is narrower."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)


def write_json(content: dict[str, Any], path: str) -> None:
    """Write plain content to a file, or print it where the path is "-".

    Raises:
        InvalidInputError: If the file cannot be written.
    """
    if path == STANDARD_OUTPUT:
        print(json.dumps(content), flush=True)
        return
    try:
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--json: cannot write {path!r}: {error}.") from error
