"""Optimizer and learning-rate schedule of a run."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from ._config import LrSchedulerConfig, OptimizerConfig


def make_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a model's trainable parameters."""
    params = _by_mesh(parameter for parameter in model.parameters() if parameter.requires_grad)
    kinds: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    return kinds[config.name]([{"params": group} for group in params], **options)


def _by_mesh(params: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Return groups of parameters on one mesh: what steps many at once takes no plain tensor beside a DTensor."""
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in params:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def make_scheduler(config: LrSchedulerConfig, optimizer: torch.optim.Optimizer, train_iters: int) -> LambdaLR:
    """Return the schedule: linear warmup, then constant, linear or cosine to `train_iters`."""
    name = "constant_with_warmup" if config.name == "constant" else config.name
    schedule: LambdaLR = get_scheduler(
        name, optimizer, num_warmup_steps=config.warmup_iters, num_training_steps=train_iters
    )
    return schedule
