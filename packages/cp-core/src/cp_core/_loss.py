"""The loss contract: local sums in, one global mean out, scaled once for the way gradients are joined."""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import InvalidInputError, all_reduce_sum, gather_objects

from ._labels import IGNORE_INDEX

# Sums of the same weights in another order differ by rounding; a forgotten batch differs by far more.
_WEIGHT_ROUNDING = 1e-6


class GlobalLoss(NamedTuple):
    """The three faces of one loss."""

    # 0-d, differentiable: call backward on it. Its value means nothing by itself.
    backward: torch.Tensor
    # 0-d, detached: the global loss sum of this call over the same denominator; equal on all ranks.
    logged: torch.Tensor
    # Tokens of this call over all ranks that have a label.
    valid_tokens: int


class _Part(NamedTuple):
    """What one rank tells the others."""

    valid_tokens: int
    # None where the mean is over tokens.
    weight_sum: float | None
    # Window and grad_average_degree, which must be the same everywhere.
    declared: tuple[int | None, float | None, int]
    # What is wrong with this rank's arguments, if anything: a fault on one rank stops all.
    fault: str | None


def count_valid_tokens(shift_labels: torch.Tensor) -> int:
    """Return how many labels are not -100.

    Args:
        shift_labels: `[B, L]`. Count before moving it to a device: the host waits for the answer.
    """
    return int((shift_labels != IGNORE_INDEX).sum())


def sum_loss_weights(loss_weights: torch.Tensor) -> float:
    """Return the sum of this rank's loss weights, in float64.

    Args:
        loss_weights: `[B, L]`, as `shard_batch_for_cp` returns them: 0 where there is no label. Sum before moving it to
            a device: the host waits for the answer.
    """
    return float(loss_weights.detach().cpu().double().sum())


def mean_global_loss(
    local_loss_sum: torch.Tensor,
    local_valid_tokens: int,
    *,
    dp_cp_mesh: DeviceMesh | None,
    grad_average_degree: int,
    window_valid_tokens: int | None = None,
    local_weight_sum: float | None = None,
    window_weight_sum: float | None = None,
) -> GlobalLoss:
    """Turn this rank's loss sum into the mean over the valid tokens of all ranks.

    With N valid tokens in all and loss sums `s_r`, the loss is `sum_r s_r / N`, so each rank's part of the gradient is
    `ds_r / N`; where gradients are averaged over a group of size G afterwards, the part is scaled by G, once.

    With `loss_weights` the loss sum is that of `weight * loss` and N the sum of the weights over all ranks:

        weighted = (token_losses * batch["loss_weights"]).sum()
        mean_global_loss(weighted, count_valid_tokens(...), ..., local_weight_sum=sum_loss_weights(...))

    Args:
        local_loss_sum: 0-d sum of the losses of this rank's valid tokens; 0 on a rank that has none.
        local_valid_tokens: How many there are.
        dp_cp_mesh: 1-D mesh of all ranks that hold different tokens (data and context parallel), not tensor parallel.
        grad_average_degree: Size of the group whose average the gradients will get; 1 where they are summed.
        window_valid_tokens: Global count over all calls of a gradient-accumulation window; needed when accumulating,
            so fetch the window's batches before its first backward. None: this call is the window.
        local_weight_sum: `sum_loss_weights` of this rank; on all ranks or on none. None: each valid token weighs 1.
        window_weight_sum: Global weight sum over the window, in the place of `window_valid_tokens` where tokens have
            weights.

    Returns:
        `GlobalLoss(backward, logged, valid_tokens)`. Over a window the `logged` values add up to the window's mean.
        `valid_tokens` counts labels, also those that weigh 0.

    Raises:
        InvalidInputError: On all ranks, if on one the loss is no scalar, a count or weight sum is negative or not
            finite, or the window holds less than this call; if only some ranks have weights, ranks have different
            windows or degrees, or a window of the other kind is given.
    """
    count, fault = _integer(local_valid_tokens)
    fault = fault or _fault_of(local_loss_sum, count, grad_average_degree, local_weight_sum)
    declared = (window_valid_tokens, window_weight_sum, grad_average_degree)
    weight_sum = None if local_weight_sum is None else float(local_weight_sum)
    parts = gather_objects(_Part(count, weight_sum, declared, fault), mesh=dp_cp_mesh)
    _refuse_parts(parts)
    valid_tokens = sum(part.valid_tokens for part in parts)
    denominator = _denominator(parts, window_valid_tokens, window_weight_sum)
    logged = local_loss_sum.detach().clone()
    all_reduce_sum([logged], mesh=dp_cp_mesh)
    return GlobalLoss(
        backward=local_loss_sum * (grad_average_degree / denominator),
        logged=logged / denominator,
        valid_tokens=valid_tokens,
    )


def _integer(valid_tokens: SupportsIndex) -> tuple[int, str | None]:
    try:
        return operator.index(valid_tokens), None
    except TypeError:
        return 0, (
            f"local_valid_tokens must be an integer count of labels, but got {valid_tokens!r}; the sum of loss weights "
            "is local_weight_sum."
        )


def _fault_of(
    loss_sum: torch.Tensor, valid_tokens: int, grad_average_degree: int, weight_sum: float | None
) -> str | None:
    if loss_sum.numel() != 1 or valid_tokens < 0 or grad_average_degree < 1:
        return (
            "mean_global_loss needs a scalar loss sum, a token count of at least 0 and a grad_average_degree of at "
            f"least 1, but got shape {tuple(loss_sum.shape)}, {valid_tokens} and {grad_average_degree}."
        )
    if weight_sum is not None and not 0 <= weight_sum < math.inf:
        return f"local_weight_sum must be finite and at least 0, but got {weight_sum}."
    return None


def _refuse_parts(parts: Sequence[_Part]) -> None:
    faulty = [rank for rank, part in enumerate(parts) if part.fault is not None]
    if faulty:
        fault = parts[faulty[0]].fault
        raise InvalidInputError(f"rank {faulty[0]} of {len(parts)}: {fault}" if len(parts) > 1 else fault)
    unweighted = [rank for rank, part in enumerate(parts) if part.weight_sum is None]
    if unweighted and len(unweighted) < len(parts):
        raise InvalidInputError(
            f"local_weight_sum must be given on all ranks or on none, but rank {unweighted[0]} of {len(parts)} has "
            "none; a rank whose tokens all weigh nothing gives 0."
        )
    differing = [rank for rank, part in enumerate(parts) if part.declared != parts[0].declared]
    if differing:
        raise InvalidInputError(
            "window_valid_tokens, window_weight_sum and grad_average_degree must be the same on all ranks, but rank 0 "
            f"has {parts[0].declared} and rank {differing[0]} has {parts[differing[0]].declared}; sum the window over "
            "all ranks, not over this rank's batches alone."
        )


def _denominator(parts: Sequence[_Part], window_valid_tokens: int | None, window_weight_sum: float | None) -> float:
    """Return what the loss sums are divided by: a count, or with weights their sum; the same on all ranks."""
    weights = [part.weight_sum for part in parts if part.weight_sum is not None]
    if (window_valid_tokens if weights else window_weight_sum) is not None:
        raise InvalidInputError(
            "the window of a mean over weights is window_weight_sum, beside local_weight_sum, and that of a mean over "
            f"tokens is window_valid_tokens; this mean is over {'weights' if weights else 'tokens'}."
        )
    if not weights:
        own: float = sum(part.valid_tokens for part in parts)
        window: float = own if window_valid_tokens is None else window_valid_tokens
        if window < own:
            raise InvalidInputError(
                f"window_valid_tokens ({window}) is less than the {own} valid tokens of this call; count all batches "
                "of the accumulation window over all ranks."
            )
    else:
        own = math.fsum(weights)  # rounds once, so it does not matter how tokens are spread over ranks
        window = own if window_weight_sum is None else window_weight_sum
        if not own * (1 - _WEIGHT_ROUNDING) <= window < math.inf:
            raise InvalidInputError(
                f"window_weight_sum ({window}) must be finite and not less than the weights of this call ({own}); sum "
                "all batches of the accumulation window over all ranks."
            )
    return window or 1  # nothing weighs anything: the loss sums are 0, and so is the mean
