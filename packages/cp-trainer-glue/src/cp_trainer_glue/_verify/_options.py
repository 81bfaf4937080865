"""What `verify` changes of a run so that it can be compared with one device, all of it said."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from cp_core import InvalidInputError

from .._blocks import transformer_blocks
from .._config import FsdpConfig, LrSchedulerConfig, ModelConfig, OptimizerConfig, TrainerConfig

LEARNING_RATE = 0.1
_LAYER_LISTS = ("layer_types", "no_rope_layers", "mlp_layer_types")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """How much is verified, and on how small a model."""

    # Optimizer steps.
    steps: int = 2
    # "config" leaves the dtypes of the config.
    dtype: Literal["float64", "config"] = "float64"
    # Tokens of a sequence; None leaves the config's.
    seq_length: int | None = None
    # The first so many layers are kept; None keeps all.
    layers: int | None = None


class VerifiedConfig(NamedTuple):
    """The config that is verified."""

    config: TrainerConfig
    # What it changed of the user's, a line each.
    changes: tuple[str, ...]


def verified_config(config: TrainerConfig, options: VerifyOptions, *, output_dir: str) -> VerifiedConfig:
    """Return a user's config with what verifying needs in the place of some of it.

    Args:
        config: The user's.
        options: What the command was asked for.
        output_dir: Where data caches go; the user's folder is not touched.
    """
    parts = (
        _model(config.model, options),
        _data(config, options),
        _optimizer(config),
        _fsdp(config.fsdp_config, options),
    )
    update: dict[str, Any] = {"output_dir": output_dir}
    for part in parts:
        update |= part.sections
    return VerifiedConfig(config.model_copy(update=update), tuple(line for part in parts for line in part.lines))


class _Part(NamedTuple):
    sections: dict[str, Any]
    lines: list[str]


def _model(model: ModelConfig, options: VerifyOptions) -> _Part:
    update: dict[str, Any] = {}
    lines = []
    if options.dtype == "float64" and model.dtype != "float64":
        update["dtype"] = "float64"
        lines.append(f"dtype: float64 (was {model.dtype}), so that only rounding of 1e-16 is left to differ")
    if options.dtype == "float64" and model.experts_implementation == "grouped_mm":
        update["experts_implementation"] = "eager"
        lines.append("experts_implementation: eager (was grouped_mm), which float64 needs")
    fields, shrunk = _fewer_layers(model.config, options.layers)
    if fields is not model.config:
        update["config"] = fields
    return _Part({"model": model.model_copy(update=update)}, [*lines, *shrunk])


def _fewer_layers(fields: dict[str, Any] | None, layers: int | None) -> tuple[dict[str, Any] | None, list[str]]:
    declared = None if fields is None else fields.get("num_hidden_layers")
    if layers is None or fields is None or not isinstance(declared, int) or layers >= declared:
        return fields, []
    lists = {name: fields[name][:layers] for name in _LAYER_LISTS if isinstance(fields.get(name), list)}
    return {**fields, **lists, "num_hidden_layers": layers}, [f"layers: the first {layers} of {declared}"]


def _data(config: TrainerConfig, options: VerifyOptions) -> _Part:
    if options.seq_length is None or options.seq_length == config.data.seq_length:
        return _Part({}, [])
    line = f"seq_length: {options.seq_length} (was {config.data.seq_length})"
    return _Part({"data": config.data.model_copy(update={"seq_length": options.seq_length})}, [line])


def _optimizer(config: TrainerConfig) -> _Part:
    line = (
        f"optimizer: sgd, lr {LEARNING_RATE}, constant (was {config.optimizer.name}, {config.lr_scheduler.name}): an "
        "adaptive one divides by the gradient's own size, which hides a wrong scale and makes steps of rounding"
    )
    sgd = OptimizerConfig(name="sgd", lr=LEARNING_RATE)
    return _Part({"optimizer": sgd, "lr_scheduler": LrSchedulerConfig()}, [line])


def _fsdp(fsdp: FsdpConfig | None, options: VerifyOptions) -> _Part:
    if fsdp is None or options.dtype == "config" or (fsdp.param_dtype, fsdp.reduce_dtype) == (None, None):
        return _Part({}, [])
    given = {"param_dtype": fsdp.param_dtype, "reduce_dtype": fsdp.reduce_dtype}
    were = ", ".join(f"{name} {dtype}" for name, dtype in given.items() if dtype)
    line = f"fsdp: computes and sums in float64 (was {were})"
    return _Part({"fsdp": fsdp.model_copy(update={"param_dtype": None, "reduce_dtype": None})}, [line])


def prepare_model(model: torch.nn.Module, options: VerifyOptions) -> list[str]:
    """Change a model that was just built, in place, and return what was changed, a line each.

    Args:
        model: As `build_model` returned it.
        options: What the command was asked for.

    Raises:
        InvalidInputError: If it has fewer layers than are asked for.
    """
    steps: list[Callable[[], list[str]]] = [
        lambda: _cut_layers(model, options.layers),
        lambda: _without_dropout(model),
        lambda: _widened(model, options),
    ]
    return [line for step in steps for line in step()]


def _cut_layers(model: torch.nn.Module, layers: int | None) -> list[str]:
    if layers is None:
        return []
    names = list(transformer_blocks(model))
    if len(names) < layers:
        raise InvalidInputError(f"--layers {layers}: the model has only {len(names)} layers with an attention.")
    if len(names) == layers:
        return []
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) != 1:
        raise InvalidInputError(
            f"--layers {layers}: the layers of this model lie in {len(parents)} lists ({', '.join(sorted(parents))}), "
            "so the first ones of the whole are not known; leave --layers out and pass --seq-length."
        )
    del model.get_submodule(parents.pop())[layers:]  # type: ignore[operator]  # a ModuleList
    config: Any = getattr(model, "config", None)
    for name in _LAYER_LISTS:
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[:layers])
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = layers
    return [f"layers: the first {layers} of {len(names)}"]


def _without_dropout(model: torch.nn.Module) -> list[str]:
    found = 0
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p, found = 0.0, found + 1
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                found += 1
    config: Any = getattr(model, "config", None)
    for name, value in list(vars(config).items()) if config is not None else []:
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float) and value > 0:
            setattr(config, name, 0.0)
            found += 1
    return [f"dropout: 0 in {found} places, since ranks draw other numbers than one device"] if found else []


def _widened(model: torch.nn.Module, options: VerifyOptions) -> list[str]:
    lines = []
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None)
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    if options.dtype == "float64" and experts == "eager" and has_experts:
        lines.append("experts_implementation: eager, which float64 needs")
    narrow = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype != torch.float64})
    if options.dtype == "float64" and narrow:
        model.to(torch.float64)
        lines.append(f"dtype: parameters in {', '.join(narrow)} are float64")
    return lines
