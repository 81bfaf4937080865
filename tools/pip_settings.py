"""What pip is told by its own settings, said again in uv's words.

pip reads options from its environment variables and from its configuration files; uv reads neither. A user whose pip
knows where a CPU build of torch lies expects the same of the sessions here, so they run uv with `uv_environment(...)`.
"""

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# pip's option -> uv's environment variable, and what uv puts between several values (pip: white space).
_LISTS = {
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "extra-index-url": ("UV_INDEX", " "),
}
_VALUES = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE", "no-index": "UV_NO_INDEX"}
# Later sections win, as in pip: command-independent, then `pip install`'s own, then the environment.
_SECTIONS = ("global", "install", ":env:")


def pip_config_list() -> str:
    """Return what `pip config list` prints: every option that pip has from files and from its environment."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def uv_environment(config_list: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Translate pip's settings into uv's environment variables.

    Args:
        config_list: Output of `pip config list`, lines such as `global.find-links='/wheels'`.
        environment: The process's environment. What it says to uv already wins over what pip is told; locations of
            find-links are joined.

    Returns:
        The variables to add. Indexes that are folders are passed on only if they exist.
    """
    options = _options(config_list)
    translated: dict[str, str] = {}
    for option, (variable, separator) in _LISTS.items():
        values = [value for value in options.get(option, "").split() if _is_reachable(option, value)]
        if option == "find-links":
            values = list(dict.fromkeys([*environment.get(variable, "").split(separator), *values]))
            values = [value for value in values if value]
        elif variable in environment:
            continue
        if values:
            translated[variable] = separator.join(values)
    for option, variable in _VALUES.items():
        if options.get(option) and variable not in environment:
            translated[variable] = options[option]
    if "UV_INDEX" in translated and "UV_INDEX_STRATEGY" not in environment:
        # pip takes the best version of all indexes; uv would stop at the first index that knows the name.
        translated["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return translated


def _options(config_list: str) -> dict[str, str]:
    by_section: dict[str, dict[str, str]] = {}
    for line in config_list.splitlines():
        key, separator, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if separator:
            by_section.setdefault(section, {})[option] = str(ast.literal_eval(value))
    return {option: value for section in _SECTIONS for option, value in by_section.get(section, {}).items()}


def _is_reachable(option: str, value: str) -> bool:
    """Whether uv can use a value: a folder that is not there is an error to uv, and nothing to pip."""
    path = value.removeprefix("file://") if value.startswith("file://") else value
    return "://" in path or option == "constraint" or Path(path).exists()
