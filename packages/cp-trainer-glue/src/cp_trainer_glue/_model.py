"""The model of a run, built by transformers, the same on all ranks."""

import inspect
import logging
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from cp_collectives import gather_objects
from cp_core import InvalidInputError, tensor_digest

from ._config import ModelConfig
from ._expert_balance import ExpertBalance
from ._tokenizer import Tokenizer

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
        hf_config = _hf_config(config)
        if config.experts_implementation is None and _needs_eager_experts(config, hf_config):
            _logger.info("model.dtype is float64: experts_implementation is eager, since grouped_mm refuses float64.")
        if config.pretrained is None:
            return _without_cache(_from_config(config, hf_config))
        options = _options(config, hf_config)
        try:
            model = AutoModelForCausalLM.from_pretrained(config.pretrained, config=hf_config, **options)
        except Exception as error:  # transformers and safetensors judge files with errors of many kinds
            raise InvalidInputError(
                f"model.pretrained: cannot load {config.pretrained!r}: {_first_sentence(error)}"
            ) from error
        return _without_cache(model)

    @classmethod
    def skeleton(cls, config: ModelConfig) -> PreTrainedModel:
        """Build the model that a config names without weights, on the meta device.

        Args:
            config: The `model` section.

        Raises:
            InvalidInputError: As `build`, but for weights that cannot be loaded.
            UnsupportedError: If it would have a loss of experts that cannot be taken over.
        """
        with torch.device("meta"):
            model = _from_config(config, _hf_config(config))
        ExpertBalance.take_over(model)
        return model


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


def require_vocabulary(model: PreTrainedModel, tokenizer: Tokenizer, name: str) -> None:
    """Check that a model has an embedding for every id of a tokenizer.

    Raises:
        InvalidInputError: If it has not.
    """
    vocab_size = model.get_input_embeddings().num_embeddings
    if vocab_size < tokenizer.vocab_size:
        raise InvalidInputError(
            f"the model's vocab_size ({vocab_size}) must hold the {tokenizer.vocab_size} ids of tokenizer {name!r}."
        )


def require_positions(model: PreTrainedModel, seq_length: int) -> None:
    """Check that a model with a table of positions has one for every token of a sequence.

    Raises:
        InvalidInputError: If the table is shorter.
    """
    for name, module in model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding) and re.search(r"(^|[._])(wpe|embed_positions)$", name)
        if is_table and int(module.num_embeddings) < seq_length:
            raise InvalidInputError(
                f"{name} of the model has {module.num_embeddings} positions, but data.seq_length is {seq_length}; give "
                "the model more, or shorten the sequences."
            )


def _hf_config(config: ModelConfig) -> Any:
    if config.pretrained is not None:
        return _pretrained_config(config.pretrained)
    fields = dict(config.config or {})
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise InvalidInputError(
            "model.config.model_type: is missing; name a family of transformers, such as qwen3_moe."
        )
    try:
        defaults = AutoConfig.for_model(model_type)
    except (ValueError, KeyError, TypeError) as error:
        hint = _nearest(str(model_type), CONFIG_MAPPING_NAMES)
        raise InvalidInputError(
            f"model.config.model_type: transformers knows no model type {model_type!r}.{hint}"
        ) from error
    known = {*defaults.to_dict(), *inspect.signature(type(defaults).__init__).parameters, *_EARLIER_FIELDS}
    unknown = [name for name in fields if name not in known and not _is_read_by_model(defaults, name)]
    faults = [f"model.config.{name}: {model_type} has no such field.{_nearest(name, known)}" for name in unknown]
    try:
        hf_config = AutoConfig.for_model(model_type, **{k: v for k, v in fields.items() if k not in unknown})
    except Exception as error:  # as in _from_config
        faults.append(f"model.config: {model_type} refuses it: {_first_sentence(error)}")
    if faults:
        raise InvalidInputError("\n".join(faults))
    return hf_config


def _pretrained_config(name: str) -> Any:
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise InvalidInputError(f"model.pretrained: cannot load {name!r}: there is no such folder.")
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # as in _from_config
        raise InvalidInputError(f"model.pretrained: cannot load {name!r}: {_first_sentence(error)}") from error


def _from_config(config: ModelConfig, hf_config: Any) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config, **_options(config, hf_config))
    except Exception as error:  # transformers judges the user's values with errors of many kinds
        raise InvalidInputError(
            f"model: {hf_config.model_type} cannot be built from its config: {_first_sentence(error)}"
        ) from error
    return model


def _nearest(name: str, choices: Iterable[str]) -> str:
    close = get_close_matches(name, sorted(choices), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _first_sentence(error: Exception) -> str:
    """What transformers says goes on with advice about its own repository."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words.split('. ')[0][:300]}"


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
    if experts is None and _needs_eager_experts(config, hf_config):
        experts = "eager"
    if experts is not None:
        options["experts_implementation"] = experts
    return options


def _needs_eager_experts(config: ModelConfig, hf_config: Any) -> bool:
    num_experts = (getattr(hf_config, name, None) for name in ("num_experts", "num_local_experts"))
    return config.dtype == "float64" and any(num_experts)


def _without_cache(model: PreTrainedModel) -> PreTrainedModel:
    if getattr(model.config, "use_cache", False):
        _logger.info("config.use_cache was True by default and is now False: key/value caches are for inference.")
        model.config.use_cache = False
    return model
