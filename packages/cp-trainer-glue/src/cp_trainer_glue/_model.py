"""The model of a run, built by transformers, the same on all ranks."""

import inspect
import logging
from difflib import get_close_matches
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cp_collectives import gather_objects
from cp_core import InvalidInputError, tensor_digest

from ._config import ModelConfig

_logger = logging.getLogger("cp_trainer_glue")
# Older names of fields that transformers still takes.
_EARLIER_FIELDS = ("rope_theta", "rope_scaling", "torch_dtype")


class HyperAutoModel:
    """Builds causal language models of transformers from a config section."""

    @classmethod
    def build(cls, config: ModelConfig) -> PreTrainedModel:
        """Build the model that a config names.

        Args:
            config: The `model` section; seed torch before, so that all ranks get the same random weights.

        Raises:
            InvalidInputError: On an unknown model type or field, or a folder without a model.
        """
        return cls.from_config(config) if config.pretrained is None else cls.from_pretrained(config)

    @classmethod
    def from_config(cls, config: ModelConfig) -> PreTrainedModel:
        """Build a model with random weights from `config.config`."""
        fields = dict(config.config or {})
        model_type = fields.pop("model_type", None)
        hf_config = _hf_config(model_type, fields)
        try:
            model = AutoModelForCausalLM.from_config(hf_config, **_options(config, hf_config))
        except Exception as error:  # transformers judges the user's values with errors of many kinds
            raise InvalidInputError(f"model.config: {model_type} cannot be built from it: {error}") from error
        return _without_cache(model)

    @classmethod
    def from_pretrained(cls, config: ModelConfig) -> PreTrainedModel:
        """Load a model with its weights from `config.pretrained`."""
        try:
            hf_config = AutoConfig.from_pretrained(config.pretrained)
            model = AutoModelForCausalLM.from_pretrained(
                config.pretrained, config=hf_config, **_options(config, hf_config)
            )
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"model.pretrained: cannot load {config.pretrained!r}: {error}") from error
        return _without_cache(model)


def require_equal_parameters(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Check that all ranks start from the same weights.

    Args:
        model: The model before any training.
        mesh: 1-D mesh of all ranks.

    Raises:
        InvalidInputError: On all ranks, naming the first parameter that differs and where.
    """
    digests = {name: tensor_digest(parameter) for name, parameter in model.named_parameters()}
    first, *others = gather_objects(digests, mesh=mesh)
    for rank, other in enumerate(others, start=1):
        differing = [name for name in first if first[name] != other.get(name)]
        if differing:
            raise InvalidInputError(
                f"{len(differing)} parameters of rank {rank} differ from rank 0's before the first step, first "
                f"{differing[0]}; all ranks must load the same weights, or seed alike."
            )


def _hf_config(model_type: Any, fields: dict[str, Any]) -> Any:
    try:
        defaults = AutoConfig.for_model(model_type)
    except (ValueError, KeyError) as error:
        raise InvalidInputError(f"model.config.model_type: transformers knows no model type {model_type!r}.") from error
    known = {*defaults.to_dict(), *inspect.signature(type(defaults).__init__).parameters, *_EARLIER_FIELDS}
    for name in fields:
        if name not in known and not _is_read_by_model(defaults, name):
            close = get_close_matches(name, sorted(known), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InvalidInputError(f"model.config.{name}: {model_type} has no such field.{hint}")
    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # as above
        raise InvalidInputError(f"model.config: {model_type} refuses it: {error}") from error


def _is_read_by_model(defaults: Any, name: str) -> bool:
    """Whether the model's source reads a field that its config class does not list, as Qwen3-MoE does `head_dim`."""
    model_class = AutoModelForCausalLM._model_mapping.get(type(defaults), None)
    if model_class is None:
        return False
    source = inspect.getsource(inspect.getmodule(model_class) or model_class)
    return f"config.{name}" in source or f'config, "{name}"' in source


def _options(config: ModelConfig, hf_config: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": config.attn_implementation,
    }
    experts = config.experts_implementation
    if experts is None and config.dtype == "float64" and hasattr(hf_config, "num_experts"):
        experts = "eager"
        _logger.info("model.dtype is float64: experts_implementation is eager, since grouped_mm refuses float64.")
    if experts is not None:
        options["experts_implementation"] = experts
    return options


def _without_cache(model: PreTrainedModel) -> PreTrainedModel:
    if getattr(model.config, "use_cache", False):
        _logger.info("config.use_cache was True by default and is now False: key/value caches are for inference.")
        model.config.use_cache = False
    return model
