"""A model at cp size 1: no attention is wrapped, unless a batch has pads that nothing else would hide.

A model of transformers hides them itself: it gets the pads of the layout as its attention mask. A module that calls
`F.scaled_dot_product_attention` without a mask gets its call taken over, as at any other cp size.
"""

import inspect
from typing import Any

import torch

from cp_core import AllGatherStrategy, InvalidInputError, SequenceLayout

from ._attention_settings import asks_config_for_attention, refuse_leading_pads
from ._boundaries import find_attention_boundaries
from ._boundary import LAYOUT_KEYWORD, AttentionBoundary, attach, restore_forward
from ._entries import entries
from ._forward_code import calls_sdpa
from ._sdpa_forwards import SdpaForward


class OneRank:
    """Hides the pads of a model at cp size 1."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooks = [e.register_forward_pre_hook(_with_attention_mask, with_kwargs=True) for e in entries(model)]
        # Modules whose forward was replaced, each with its boundary and what stood on it before.
        self._wrapped: list[tuple[torch.nn.Module, AttentionBoundary, object | None]] = []

    def set_layout(self, layout: SequenceLayout) -> None:
        """Set the layout of the next forwards; the first one with pads wraps the attentions that would see them.

        Raises:
            ContextParallelError: If an attention cannot be kept from seeing them.
        """
        if layout.key_padding is None and not self._wrapped:
            return
        if not self._wrapped:
            self._wrap()
        for _, boundary, _ in self._wrapped:
            boundary.check_layout(layout)
        for _, boundary, _ in self._wrapped:
            boundary.set_layout(layout)

    def remove(self) -> None:
        """Give the model its own forwards back."""
        for hook in self._hooks:
            hook.remove()
        for module, _, earlier in self._wrapped:
            restore_forward(module, earlier)
        self._hooks, self._wrapped = [], []

    def _wrap(self) -> None:
        attentions = find_attention_boundaries(self._model)
        for name, module in attentions.items():
            _require_own_call(name, module)
        for name, module in attentions.items():
            boundary = AttentionBoundary(name=name, strategy=AllGatherStrategy(), cp_mesh=None)
            attach(module, boundary)
            self._wrapped.append((module, boundary, module.__dict__.get("forward")))
            module.__dict__["forward"] = SdpaForward(module, boundary, heads=None)


def _require_own_call(name: str, module: torch.nn.Module) -> None:
    if asks_config_for_attention(module) or not any(calls_sdpa(inner) for inner in module.modules()):
        raise InvalidInputError(
            f"the layout has pads, and at cp size 1 no attention is wrapped, so nothing would hide them from {name} "
            f"({type(module).__name__}); call the model with the batch of shard_batch, whose cp_layout becomes its "
            "attention_mask, or with a mask of your own."
        )


def _with_attention_mask(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    layout = kwargs.get(LAYOUT_KEYWORD)
    if layout is None or layout.key_padding is None or kwargs.get("attention_mask") is not None:
        return None
    refuse_leading_pads(getattr(model, "config", None), type(model).__name__, layout)
    parameters = inspect.signature(model.forward).parameters
    if "attention_mask" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise InvalidInputError(
            f"the batch has pads, which at cp size 1 the model's own mask hides, but {type(model).__name__} takes no "
            "attention_mask; give its cp_layout to set_layout instead."
        )
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    device = next((tensor.device for tensor in tensors), layout.key_padding.device)
    return args, {**kwargs, "attention_mask": layout.key_padding.to(device)}
