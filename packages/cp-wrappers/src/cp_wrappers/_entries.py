"""What a wrapped model of transformers must be called with, and must not: seen where it is called."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from cp_core import InvalidInputError

from ._boundary import LAYOUT_KEYWORD


def entries(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model and the models of transformers inside it."""
    return [module for module in model.modules() if module is model or hasattr(module, "base_model_prefix")]


def watch_entries(model: torch.nn.Module, attentions: Sequence[torch.nn.Module]) -> list[RemovableHandle]:
    """Refuse calls of models that hold one of the attentions and would make positions or targets from a shard."""
    wrapped = {id(attention) for attention in attentions}
    return [
        entry.register_forward_pre_hook(_require_batch_fields, with_kwargs=True)
        for entry in entries(model)
        if "position_ids" in inspect.signature(entry.forward).parameters
        and any(id(module) in wrapped for module in entry.modules())
    ]


def _require_batch_fields(entry: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get(LAYOUT_KEYWORD) is None:
        return
    given = inspect.signature(entry.forward).bind_partial(*args, **kwargs).arguments
    name = type(entry).__name__
    if given.get("position_ids") is None:
        raise InvalidInputError(
            f"{name} was called with a cp_layout but no position_ids, which it would count from 0 on every rank; call "
            "it with all that shard_batch_for_cp returned."
        )
    if given.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise InvalidInputError(
            f"{name} was called with labels, which it would shift on this rank's shard and lose the target of its last "
            "token; compute the loss from its logits and the shift_labels of shard_batch_for_cp."
        )
