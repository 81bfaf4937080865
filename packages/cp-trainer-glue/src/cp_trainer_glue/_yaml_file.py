"""Reading a YAML file and settings of the command line into plain content."""

import json
from pathlib import Path
from typing import Any

import yaml

from cp_core import InvalidInputError


class ConfigError(InvalidInputError):
    """A config file is wrong; the message holds one line per fault."""


_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML without silent overwriting: a key given twice is an error."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
    twice = sorted({str(key) for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"line {node.start_mark.line + 1}: {', '.join(twice)} is given twice; keep one.")
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file, a mapping with text for keys.

    Raises:
        ConfigError: If it cannot be read, is not YAML, or is something else.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:  # PyYAML raises errors of many kinds for values that do not fit their tag
        raise ConfigError(f"{path}: is not YAML: {_words(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: must be a mapping with keys such as model and data, but is "
            f"{'empty' if content is None else type(content).__name__}."
        )
    _require_text(content, str(path))
    if odd := [key for key in content if not isinstance(key, str)]:
        raise ConfigError(f"{path}: keys must be text, but {', '.join(map(repr, odd))} is not.")
    return content


def set_value(content: dict[str, Any], setting: str) -> None:
    """Replace one value in the content by an `a.b=value` setting; values are YAML, list items go by number.

    Raises:
        ConfigError: If the setting has no such form, or there is no such place.
    """
    key, separator, text = setting.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set {setting!r}: must be a.b=value.")
    *parents, last = key.split(".")
    place: Any = content
    for parent in parents:
        place = _step(place, parent, setting)
    try:
        # A lone value has nothing that an alias could stand for: what begins with a star is a pattern.
        value = text if text.startswith("*") else yaml.load(text, Loader=_Loader)
    except Exception as error:  # as above
        raise ConfigError(f"--set {setting[:200]!r}: the value is not YAML: {_words(error)}") from error
    _require_text(value, f"--set {setting[:200]!r}")
    if isinstance(place, list):
        place[_index(place, last, setting)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise ConfigError(f"--set {setting!r}: {'.'.join(parents)} is a value, not a mapping.")


def _require_text(content: object, name: str) -> None:
    """Refuse what no file can hold: escapes of half a character."""
    try:
        json.dumps(content, ensure_ascii=False, skipkeys=True, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}: holds text that is not Unicode: {error}") from error


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, yaml.YAMLError) else f"{type(error).__name__} {error}"


def _step(place: Any, key: str, setting: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, key, setting)]
    if not isinstance(place, dict):
        raise ConfigError(f"--set {setting!r}: there is no mapping above {key!r}.")
    if place.get(key) is None:
        place[key] = {}
    return place[key]


def _index(place: list[Any], key: str, setting: str) -> int:
    if not key.isdecimal() or int(key) >= len(place):
        raise ConfigError(f"--set {setting!r}: {key!r} is no item of a list of {len(place)}.")
    return int(key)
