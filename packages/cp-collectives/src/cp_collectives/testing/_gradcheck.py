"""What makes torch's gradcheck work on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def mean_gradient_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, whose gradient becomes the mean of what the ranks have for it.

    All ranks run `gradcheck` in lock step on the same whole input, each computes its own part of one global output, and
    gathers all of it. Each then sends back the gradient of the same output, and their mean is the gradient of one.

    Example:
        >>> local = mean_gradient_over_ranks(whole)[rank]

    Backward: all-reduce (sum) over the default group, divided by its size.
    """
    shared: torch.Tensor = _MeanGradient.apply(tensor)
    return shared


class _MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        mean = gradients[0].clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()
