"""At cp size 1 no attention is wrapped; what is left to do is to hand the layout's pads to the model's own mask."""

import inspect
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from cp_core import InvalidInputError, SequenceLayout

from ._boundary import LAYOUT_KEYWORD


def hand_over_pads(model: torch.nn.Module) -> tuple[RemovableHandle, ...]:
    """Give a model, and models of transformers inside, the pads of a batch's `cp_layout` as its `attention_mask`."""
    entries = [module for module in model.modules() if module is model or hasattr(module, "base_model_prefix")]
    return tuple(module.register_forward_pre_hook(_with_attention_mask, with_kwargs=True) for module in entries)


def refuse_pads(layout: SequenceLayout) -> None:
    """Refuse a layout with pads for a model that is not wrapped and gets none of its keyword arguments.

    Raises:
        InvalidInputError: If the layout hides a token.
    """
    if layout.key_padding is not None:
        raise InvalidInputError(
            "at cp size 1 no attention is wrapped, so nothing would hide the pads of this layout; call the model with "
            "the batch of shard_batch, whose cp_layout becomes its attention_mask, or with a mask of your own."
        )


def _with_attention_mask(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    layout = kwargs.get(LAYOUT_KEYWORD)
    if layout is None or layout.key_padding is None or kwargs.get("attention_mask") is not None:
        return None
    parameters = inspect.signature(model.forward).parameters
    if "attention_mask" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise InvalidInputError(
            f"the batch has pads, which at cp size 1 the model's own mask hides, but {type(model).__name__} takes no "
            "attention_mask; train it on batches without pads, or at cp_size 2 or more."
        )
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    device = next((tensor.device for tensor in tensors), layout.key_padding.device)
    return args, {**kwargs, "attention_mask": layout.key_padding.to(device)}
