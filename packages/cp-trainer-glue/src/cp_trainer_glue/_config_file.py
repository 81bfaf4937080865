"""Reading a config file, and saying everything that is wrong with it at once."""

import typing
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from cp_core import InvalidInputError

from ._config import TrainerConfig

# pydantic's names of kinds, in the words of a YAML file.
_YAML_WORDS = {"tuple_type": "a list", "dict_type": "a mapping", "model_type": "a mapping", "string_type": "text"}
_METHOD_KEYS = ("cp", "algorithm", "schedule", "load_balance", "async_fallback", "ulysses_degree")


class ConfigError(InvalidInputError):
    """A config file is wrong; the message holds one line per fault."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Read and check a YAML config.

    Args:
        path: The file. Relative paths in it are relative to the current directory.
        overrides: `a.b=value` settings that replace what the file says; values are YAML, list items go by number.

    Returns:
        The config, with every combination checked that can be without a model.

    Raises:
        ConfigError: With all faults together, one per line.
    """
    content = _read(Path(path))
    for override in overrides:
        _set(content, override)
    return parse_config(content, name=str(path))


def parse_config(content: dict[str, Any], *, name: str) -> TrainerConfig:
    """Check the content of a config.

    Args:
        content: What the YAML says.
        name: Name of the file, for messages.

    Raises:
        ConfigError: With all faults together, one per line.
    """
    try:
        config = TrainerConfig.model_validate(content)
    except ValidationError as error:
        faults = [_sentence(detail) for detail in error.errors(include_url=False)]
        raise ConfigError(_report(name, faults)) from None  # pydantic's own text repeats every fault
    if faults := list(_combination_faults(config)):
        raise ConfigError(_report(name, faults))
    return config


def _report(name: str, faults: Sequence[str]) -> str:
    unique = list(dict.fromkeys(faults))
    return "\n".join([f"{name}: {len(unique)} fault(s)", *(f"  {fault}" for fault in unique)])


# --- reading ------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML without silent overwriting: a key given twice is an error."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    twice = sorted({str(key) for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"line {node.start_mark.line + 1}: {', '.join(twice)} is given twice; keep one.")
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: must be a mapping with keys such as model and data, but is {type(content).__name__}."
        )
    return content


def _set(content: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip("."):
        raise ConfigError(f"--set {override!r}: must be a.b=value.")
    *parents, last = key.split(".")
    place: Any = content
    for parent in parents:
        place = _step(place, parent, override)
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from error
    if isinstance(place, list):
        place[_index(place, last, override)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise ConfigError(f"--set {override!r}: {'.'.join(parents)} is a value, not a mapping.")


def _step(place: Any, key: str, override: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, key, override)]
    if not isinstance(place, dict):
        raise ConfigError(f"--set {override!r}: there is no mapping above {key!r}.")
    if place.get(key) is None:
        place[key] = {}
    return place[key]


def _index(place: list[Any], key: str, override: str) -> int:
    if not key.isdecimal() or int(key) >= len(place):
        raise ConfigError(f"--set {override!r}: {key!r} is no item of a list of {len(place)}.")
    return int(key)


# --- saying what is wrong -----------------------------------------------------------------------------------------


def _sentence(detail: Any) -> str:
    """Turn one of pydantic's findings into a sentence of ours."""
    location = [part for part in detail["loc"] if part != "dict[str,any]" and part != "str"]
    where = ".".join(str(part) for part in location)
    if detail["type"] == "extra_forbidden":
        return _unknown_key(location, where)
    if detail["type"] == "missing":
        return f"{where}: is missing."
    expected = _YAML_WORDS.get(detail["type"], detail["msg"].removeprefix("Input should be "))
    return f"{where}: must be {expected}, but is {detail['input']!r}."


def _unknown_key(location: Sequence[Any], where: str) -> str:
    key = str(location[-1])
    if key in _METHOD_KEYS:
        return (
            f"{where}: methods are declared per attention and not here; name a wrapper in plan_overrides "
            "(inner_wrapper), and put the wrapper's data beside its _target_."
        )
    known = _keys_at(location[:-1])
    close = get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(known)}."
    return f"{where}: unknown key; {hint}"


def _keys_at(location: Sequence[Any]) -> list[str]:
    section: Any = TrainerConfig
    for part in location:
        if isinstance(part, str) and isinstance(section, type) and issubclass(section, BaseModel):
            section = _section_in(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_in(annotation: Any) -> Any:
    """Return the section that an annotation such as `tuple[PlanOverride, ...]` holds."""
    return next((part for part in (annotation, *typing.get_args(annotation)) if hasattr(part, "model_fields")), None)


def _combination_faults(config: TrainerConfig) -> Iterator[str]:
    for section, first, second in (("model", "config", "pretrained"), ("data", "source", "files")):
        values = getattr(config, section)
        if (getattr(values, first) is None) == (getattr(values, second) is None):
            yield f"{section}: needs exactly one of {first} and {second}."
    yield from _unsupported(config)
    training, dp_size = config.training, config.accelerator.dp_size
    if training.global_batch_size % (training.micro_batch_size * dp_size):
        yield (
            f"training.global_batch_size ({training.global_batch_size}) must be a multiple of micro_batch_size "
            f"({training.micro_batch_size}) times the data-parallel ranks ({dp_size})."
        )
    if (config.model.config or {}).get("use_cache") is True:
        yield "model.config.use_cache: a key/value cache is for inference; leave it out."


def _unsupported(config: TrainerConfig) -> Iterator[str]:
    accelerator = config.accelerator
    for name, instead in (
        ("pp_size", "leave it at 1"),
        ("ep_size", "leave it at 1"),
        ("tp_size", "leave it at 1 and use cp_size"),
        ("dp_shard_size", "use dp_replicate_size"),
    ):
        size = getattr(accelerator, name)
        if size != 1:
            yield f"accelerator.{name}: {size} is not supported in this version; {instead}."
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(accelerator, name):
            yield f"accelerator.{name}: needs tensor parallelism, which this version does not have; leave it false."
    if config.sharding_mode != "production":
        yield f"sharding_mode: {config.sharding_mode} is not supported in this version; use production."
    aux_loss = (config.model.config or {}).get("output_router_logits")
    if aux_loss and accelerator.cp_size * accelerator.dp_size > 1:
        yield (
            "model.config.output_router_logits: the load-balancing loss of experts is no sum over tokens, and has no "
            "right reduction over ranks in this version; set it to false."
        )
