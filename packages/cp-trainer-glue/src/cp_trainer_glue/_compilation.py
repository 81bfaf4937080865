"""torch.compile of a model's blocks, one by one; attention is a region that the compiler leaves alone."""

import torch

from ._blocks import transformer_blocks
from ._config import TrainingConfig


def compile_blocks(model: torch.nn.Module, training: TrainingConfig) -> None:
    """Compile what the config says; after context parallelism was applied, before FSDP.

    Args:
        model: The model, changed in place.
        training: `compile` and `compile_backend`.
    """
    if training.compile == "layers":
        for block in transformer_blocks(model).values():
            block.compile(backend=training.compile_backend)
