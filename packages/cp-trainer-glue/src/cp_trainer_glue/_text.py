"""The documents of a run: text of the standard library, or of the user's files."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from cp_core import InvalidInputError

from ._config import TextSource
from ._files import matching_files

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_INSTALLED_PACKAGES = {"site-packages", "dist-packages"}


def documents(config: TextSource, cache_dir: Path) -> Iterator[str]:
    """Yield every document, in an order that depends on the names of the files alone.

    Args:
        config: The section that says where text comes from.
        cache_dir: Where `datasets` keeps what it has read.

    Raises:
        InvalidInputError: If a glob matches no file, or a row has no text.
    """
    if config.files is None:
        yield from _standard_library()
        return
    for path in matching_files(config.files, place=config.place):
        yield from _read_file(path, config, cache_dir)


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _INSTALLED_PACKAGES.intersection(path.parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def _read_file(path: Path, config: TextSource, cache_dir: Path) -> Iterator[str]:
    kind = _FORMATS.get(path.suffix)
    options: dict[str, Any] = {} if kind else {"sample_by": "document"}
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs on every rank, it raises too
    try:
        rows = datasets.load_dataset(
            kind or "text", data_files=str(path), split="train", cache_dir=str(cache_dir), **options
        )
    except (datasets.exceptions.DatasetGenerationError, ValueError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{config.place}.files: cannot read {path}: {error.__cause__ or error}") from error
    field = config.text_field if kind else "text"
    if field not in rows.column_names:
        raise InvalidInputError(
            f"{config.place}.files: {path} has no field {field!r}, only {', '.join(rows.column_names)}; set "
            f"{config.place}.text_field."
        )
    for text in rows[field]:
        if not isinstance(text, str):
            raise InvalidInputError(
                f"{config.place}.files: {path}: a row's {field!r} is {type(text).__name__}, not text."
            )
        yield text
