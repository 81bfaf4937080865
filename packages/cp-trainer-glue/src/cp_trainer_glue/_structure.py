"""Whether the content of a config has the form it must have: every fault at once, and the content without them.

A fault whose right value nobody can know stays in the repaired content; the others are taken out of it, so that what
depends on them can be checked too, and a corrected text can be shown.
"""

import copy
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from ._combinations import combination_faults
from ._config import TrainerConfig

# pydantic's names of kinds, in the words of a YAML file.
_YAML_WORDS = {
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "string_type": "text",
    "int_type": "an integer",
    "bool_type": "true or false",
    "float_type": "a number",
    "float_parsing": "a number",
    "value_error": "a number",
    "invalid_key": "a mapping with text for keys",
    "string_too_short": "text that is not empty",
    "too_short": "a list that is not empty",
}
# What belongs into a wrapper's declaration and is looked for elsewhere.
_METHOD_KEYS = ("cp", "algorithm", "schedule", "load_balance", "async_fallback", "ulysses_degree")
# What an entry of plan_overrides must say where it said something else.
_ENTRY_VALUES = {"when": "cp", "region_dispatch": False}
_UNION_TAGS = ("dict[str,any]", "str")


@dataclass(slots=True)
class Structure:
    """The content of a config, looked at."""

    # The sections that have the right form as they were written.
    written: dict[str, Any]
    # Those that have it after repairs.
    sections: dict[str, Any]
    # The whole config, if nothing was wrong.
    config: TrainerConfig | None
    repaired: dict[str, Any]
    faults: list[str] = field(default_factory=list)


def check_structure(content: dict[str, Any]) -> Structure:
    """Check keys, types, ranges and combinations of a config's content.

    Args:
        content: What the YAML says; it is not changed.
    """
    written = _valid_sections(content)
    structure = Structure(written=written, sections={}, config=None, repaired=copy.deepcopy(content))
    _check_form(content, structure)
    structure.sections = _valid_sections(structure.repaired)
    for fault, repair in combination_faults(structure.sections):
        structure.faults.append(fault)
        if repair is not None:
            repair(structure.repaired)
    if not structure.faults:
        structure.config = TrainerConfig.model_validate(content)
    structure.sections = _valid_sections(structure.repaired)
    return structure


def _check_form(content: dict[str, Any], structure: Structure) -> None:
    try:
        TrainerConfig.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return
    removed: list[list[Any]] = []  # done in the end, so that numbers of items stay true
    for location, alike in _by_location(details):
        structure.faults.append(_sentence(location, alike))
        _repair(location, alike[0]["type"], structure.repaired, removed)
    _remove(removed, structure.repaired)


def _by_location(details: Sequence[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield pydantic's findings by place: a value that could be of several kinds has one for each."""
    places: dict[str, tuple[list[Any], list[Any]]] = {}
    for detail in details:
        location = [part for part in detail["loc"] if part not in _UNION_TAGS]
        if "[key]" in location:  # a key that is no text is a fault of the mapping that has it
            location = location[: location.index("[key]") - 1]
        elif detail["type"] == "invalid_key":
            location = location[:-1]
        places.setdefault(str(location), (location, []))[1].append(detail)
    yield from places.values()


def _valid_sections(content: dict[str, Any]) -> dict[str, Any]:
    sections = {}
    for name, info in TrainerConfig.model_fields.items():
        if name not in content and info.is_required():
            continue
        try:
            value = content.get(name, info.default)
            adapter: TypeAdapter[Any] = TypeAdapter(info.annotation)  # type: ignore[arg-type]  # a field has a type
            sections[name] = adapter.validate_python(value)
        except ValidationError:
            continue  # said already
    return sections


# --- sentences ----------------------------------------------------------------------------------------------------


def _sentence(location: list[Any], details: Sequence[Any]) -> str:
    """Turn pydantic's findings at one place into a sentence of ours."""
    where = ".".join(str(part) for part in location)
    kind = details[0]["type"]
    if kind == "extra_forbidden":
        return _unknown_key(location, where)
    if kind == "missing":
        return f"{where}: is missing."
    expected = " or ".join(
        dict.fromkeys(_YAML_WORDS.get(d["type"], d["msg"].removeprefix("Input should be ")) for d in details)
    )
    return f"{where}: must be {expected}, but is {_shown(details[0]['input'])}."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unknown_key(location: list[Any], where: str) -> str:
    key = str(location[-1])
    if key in _METHOD_KEYS:
        return (
            f"{where}: methods are declared per attention and not here; name a wrapper in plan_overrides "
            "(inner_wrapper), and put the wrapper's data beside its _target_."
        )
    close = _nearest_key(location)
    known = _keys_at(location[:-1])
    hint = f"did you mean {close!r}?" if close else f"known keys are {', '.join(known)}."
    if location[0] == "plan_overrides" and not close:
        hint += " If it is data of the wrapper, put it beside the wrapper's _target_."
    return f"{where}: unknown key; {hint}"


def _nearest_key(location: list[Any]) -> str | None:
    return next(iter(get_close_matches(str(location[-1]), _keys_at(location[:-1]), n=1)), None)


def _keys_at(location: Sequence[Any]) -> list[str]:
    section: Any = TrainerConfig
    for part in location:
        if isinstance(part, str) and isinstance(section, type) and issubclass(section, BaseModel):
            section = _section_in(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_in(annotation: Any) -> Any:
    """Return the section that an annotation such as `tuple[PlanOverride, ...]` holds."""
    return next((part for part in (annotation, *typing.get_args(annotation)) if hasattr(part, "model_fields")), None)


# --- repairs ------------------------------------------------------------------------------------------------------


def _repair(location: list[Any], kind: str, content: dict[str, Any], removed: list[list[Any]]) -> None:
    """Take one fault out of the content, if there is no doubt how; removals are noted and done in the end."""
    in_entry = location[0] == "plan_overrides" and len(location) >= 2
    if kind == "extra_forbidden":
        _repair_key(location, content, removed, in_entry=in_entry)
    elif location == ["plan_overrides"]:
        found = content["plan_overrides"]
        content["plan_overrides"] = [found] if isinstance(found, dict) and "match" in found else []
    elif in_entry and (len(location) == 2 or location[2] == "match"):
        removed.append(location[:2])
    elif in_entry and location[2] in _ENTRY_VALUES:
        _at(content, location[:2])[location[2]] = _ENTRY_VALUES[location[2]]
    elif in_entry:
        removed.append(location[:3])


def _remove(places: Sequence[list[Any]], content: dict[str, Any]) -> None:
    entries = [place for place in places if isinstance(place[-1], int)]
    for *parents, key in (place for place in places if place not in entries and place[:2] not in entries):
        _at(content, parents).pop(key, None)
    for *parents, index in sorted(entries, reverse=True):
        del _at(content, parents)[index]


def _repair_key(location: list[Any], content: dict[str, Any], removed: list[list[Any]], *, in_entry: bool) -> None:
    section, key = _at(content, location[:-1]), location[-1]
    close = _nearest_key(location)
    if in_entry and (key in _METHOD_KEYS or close is None) and section.get("inner_wrapper") is not None:
        wrapper = section["inner_wrapper"]
        target = dict(wrapper) if isinstance(wrapper, dict) else {"_target_": wrapper}
        section["inner_wrapper"] = {**target, key: section[key]}
    elif key not in _METHOD_KEYS and close is not None and close not in section:
        section[close] = section[key]
    removed.append(location)


def _at(content: Any, location: Sequence[Any]) -> Any:
    for part in location:
        content = content[part]
    return content
