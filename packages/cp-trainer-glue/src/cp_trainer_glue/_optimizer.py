"""Optimizer and learning-rate schedule of a run."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from ._config import LrSchedulerConfig, OptimizerConfig


def make_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a model's trainable parameters."""
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    return kinds[config.name](params, **options)


def make_scheduler(config: LrSchedulerConfig, optimizer: torch.optim.Optimizer, train_iters: int) -> LambdaLR:
    """Return the schedule: linear warmup, then constant, linear or cosine to `train_iters`."""
    name = "constant_with_warmup" if config.name == "constant" else config.name
    schedule: LambdaLR = get_scheduler(
        name, optimizer, num_warmup_steps=config.warmup_iters, num_training_steps=train_iters
    )
    return schedule
