"""What an attention of transformers is configured to do, and what of it no method of this version honours.

Read from the module and its config; transformers itself is not imported.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from cp_core import SequenceLayout, UnsupportedError

# Implementations that are causal without a mask, as their module says.
_CAUSAL_BY_THEMSELVES = ("sdpa", "flash_attention_2", "flash_attention_3")
_REFUSED_ROTARY = frozenset({"dynamic", "longrope"})
# Their learned positions start at the first real token, unlike those of every other family with a mask.
_POSITIONS_FROM_MASK = frozenset({"opt"})
_LAYER_TYPES = (None, "full_attention", "sliding_attention")


def asks_config_for_attention(module: torch.nn.Module) -> bool:
    """Whether a module has what attentions of transformers have: a config with an implementation, and causality."""
    return hasattr(module, "is_causal") and hasattr(getattr(module, "config", None), "_attn_implementation")


def refuse_unsupported(module: torch.nn.Module, fqn: str) -> None:
    """Refuse before the first forward what the module's config asks for and no method of this version honours.

    Raises:
        UnsupportedError: Naming the module and each setting.
    """
    if not _dispatches_by_name(module):
        raise UnsupportedError(
            f"{fqn} ({type(module).__name__}) computes its attention by itself, not by its config's attention "
            "implementation, which is where the _hf wrappers take part."
        )
    config: Any = module.config
    softcap, layer_type = getattr(config, "attn_logit_softcapping", None), _layer_type_of(module, config)
    dropout = getattr(module, "attention_dropout", getattr(module, "attn_dropout", 0.0))
    dropout = getattr(dropout, "p", dropout)  # some families keep the module, some the probability
    rope_types = sorted(_rope_types(getattr(config, "rope_parameters", None)).intersection(_REFUSED_ROTARY))
    latent_rank = getattr(module, "kv_lora_rank", None)
    settings = {
        f"layer type {layer_type!r}": layer_type not in _LAYER_TYPES,
        f"attention_dropout={dropout}": dropout,
        f"attn_logit_softcapping={softcap}": softcap,
        "output_router_logits, whose load-balancing loss is no sum over tokens,": getattr(
            config, "output_router_logits", False
        ),
        "attn_temperature_tuning": getattr(config, "attn_temperature_tuning", False),
        "an indexer that selects keys (sparse attention)": getattr(module, "indexer", None) is not None,
        f"multi-head latent attention (kv_lora_rank={latent_rank}), which needs a wrapper of its own before keys and "
        "values are expanded,": latent_rank,
        f"rope_type={', '.join(rope_types)}, which depends on the longest position,": rope_types,
    }
    asked = [name for name, value in settings.items() if value]
    if asked:
        raise UnsupportedError(
            f"{fqn}: {', '.join(asked)} is not supported under context parallelism in this version; change the model's "
            "config, or train at cp_size 1."
        )


def refuse_without_mask(module: torch.nn.Module, fqn: str) -> None:
    """Refuse, for a wrapper of the user's own, an attention that would lose its causality with its mask.

    Raises:
        UnsupportedError: Naming the module and its implementation.
    """
    config: Any = module.config
    implementation = config._attn_implementation
    if implementation not in (*_CAUSAL_BY_THEMSELVES, "eager"):
        raise UnsupportedError(
            f"{fqn}: the model's attn_implementation {implementation!r} takes causality from a mask, which it does not "
            "get under a wrapper of your own; use sdpa or eager."
        )


def _dispatches_by_name(module: torch.nn.Module) -> bool:
    forwards = (kind.__dict__.get("forward") for kind in type(module).__mro__)
    return any("ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(f).__globals__ for f in forwards if inspect.isfunction(f))


def _rope_types(parameters: Any) -> set[str]:
    """Return the rotary types of a config, which has one, or one per layer type."""
    if not isinstance(parameters, Mapping):
        return set()
    nested = (_rope_types(value) for value in parameters.values())
    own = parameters.get("rope_type")
    return set().union(*nested, () if own is None else (own,))


def window_of(module: Any) -> int | None:
    """Return the keys that a layer's queries see at most, None for all; families note it in three places."""
    if _layer_type_of(module, module.config) == "full_attention":
        return None
    window: int | None = getattr(module, "sliding_window", None) or getattr(module.config, "sliding_window", None)
    return window


def _layer_type_of(module: Any, config: Any) -> str | None:
    layer_types = getattr(config, "layer_types", None)
    return layer_types[module.layer_idx] if layer_types and hasattr(module, "layer_idx") else None


def require_settings_of(module: Any, name: str, *, window: int | None, sinks: torch.Tensor | None) -> None:
    """Refuse a call that does not ask for what its layer is configured to do; elsewhere a mask makes up for it.

    Raises:
        UnsupportedError: Naming the layer, what it is configured to and what was asked.
    """
    expected = window_of(module)
    if window != expected:
        raise UnsupportedError(
            f"{name}: the layer's config says sliding_window={expected}, but its attention was asked for {window}; "
            "context parallelism honours windows that are handed to the attention, and cannot tell which one holds."
        )
    if (getattr(module, "sinks", None) is None) != (sinks is None):
        raise UnsupportedError(
            f"{name}: the layer has sinks, but its attention was not handed them as s_aux (or the other way round); "
            "context parallelism honours sinks that are handed to the attention."
        )


def refuse_leading_pads(config: Any, name: str, layout: SequenceLayout) -> None:
    """Refuse pads before the tokens of a row, for a family that counts its positions in the attention mask.

    Raises:
        UnsupportedError: Naming the layer or model.
    """
    leading = any(run.positions.start > 0 for run in layout.real_runs)
    if leading and getattr(config, "model_type", None) in _POSITIONS_FROM_MASK:
        raise UnsupportedError(
            f"{name}: {config.model_type} counts positions in its attention mask, so that pads before the tokens of a "
            "row would shift them; pad after them, as tokenizer.padding_side = 'right' does."
        )
