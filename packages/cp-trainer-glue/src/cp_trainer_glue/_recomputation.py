"""Activation checkpointing: which parts of the model run their forward once more in backward."""

from collections.abc import Callable

import torch
from torch.distributed._composable import checkpoint

from cp_core import UnsupportedError
from cp_wrappers import find_attention_boundaries

from ._blocks import transformer_blocks
from ._config import TrainingConfig


def checkpoint_activations(model: torch.nn.Module, training: TrainingConfig) -> None:
    """Recompute what the config says; after context parallelism was applied, before compile and FSDP.

    Args:
        model: The model, changed in place.
        training: `activation_checkpoint` and `checkpoint_reentrant`.

    Raises:
        UnsupportedError: If reentrant recomputation is asked of a model that does not bring it.
    """
    if training.activation_checkpoint == "none":
        return
    if training.checkpoint_reentrant:
        _enable_reentrant(model)
        return
    find = transformer_blocks if training.activation_checkpoint == "full" else find_attention_boundaries
    for module in find(model).values():
        checkpoint(module)


def _enable_reentrant(model: torch.nn.Module) -> None:
    enable: Callable[..., None] | None = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UnsupportedError(
            f"training.checkpoint_reentrant: {type(model).__name__} has no gradient_checkpointing_enable of "
            "transformers; leave it false."
        )
    enable({"use_reentrant": True})
