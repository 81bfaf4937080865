"""The loss contract: local sums in, one global mean out, scaled once for the way gradients are joined."""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import InvalidInputError, all_reduce_sum, gather_objects

from ._batch_fields import IGNORE_INDEX


class GlobalLoss(NamedTuple):
    """The three faces of one loss."""

    # 0-d, differentiable: call backward on it. Its value means nothing by itself.
    backward: torch.Tensor
    # 0-d, detached: the global loss sum of this call over the same denominator; equal on all ranks.
    logged: torch.Tensor
    # Tokens of this call over all ranks that have a label.
    valid_tokens: int


def count_valid_tokens(shift_labels: torch.Tensor) -> int:
    """Return how many labels are not -100.

    Args:
        shift_labels: `[B, L]`. Count before moving it to a device: the host waits for the answer.
    """
    return int((shift_labels != IGNORE_INDEX).sum())


def mean_global_loss(
    local_loss_sum: torch.Tensor,
    local_valid_tokens: int,
    *,
    dp_cp_mesh: DeviceMesh | None,
    grad_average_degree: int,
    window_valid_tokens: int | None = None,
) -> GlobalLoss:
    """Turn this rank's loss sum into the mean over the valid tokens of all ranks.

    With N valid tokens in all and loss sums `s_r`, the loss is `sum_r s_r / N`, so each rank's part of the gradient is
    `ds_r / N`; where gradients are averaged over a group of size G afterwards, the part is scaled by G, once.

    Args:
        local_loss_sum: 0-d sum of the losses of this rank's valid tokens; 0 on a rank that has none.
        local_valid_tokens: How many there are.
        dp_cp_mesh: 1-D mesh of all ranks that hold different tokens (data and context parallel), not tensor parallel.
        grad_average_degree: Size of the group whose average the gradients will get; 1 where they are summed.
        window_valid_tokens: Global count over all calls of a gradient-accumulation window; needed when accumulating,
            so fetch the window's batches before its first backward. None: this call is the window.

    Returns:
        `GlobalLoss(backward, logged, valid_tokens)`. Over a window the `logged` values add up to the window's mean.

    Raises:
        InvalidInputError: If the loss is no scalar, a count is negative, or the window holds fewer tokens than this
            call.
    """
    if local_loss_sum.numel() != 1 or local_valid_tokens < 0 or grad_average_degree < 1:
        raise InvalidInputError(
            "mean_global_loss needs a scalar loss sum, a token count of at least 0 and a grad_average_degree of at "
            f"least 1, but got shape {tuple(local_loss_sum.shape)}, {local_valid_tokens} and {grad_average_degree}."
        )
    valid_tokens = sum(gather_objects(int(local_valid_tokens), mesh=dp_cp_mesh))
    window = valid_tokens if window_valid_tokens is None else window_valid_tokens
    if window < valid_tokens:
        raise InvalidInputError(
            f"window_valid_tokens ({window}) is less than the {valid_tokens} valid tokens of this call; count all "
            "batches of the accumulation window over all ranks."
        )
    denominator = max(window, 1)  # no valid token anywhere: the loss sums are 0, and so is the mean
    logged = local_loss_sum.detach().clone()
    all_reduce_sum([logged], mesh=dp_cp_mesh)
    return GlobalLoss(
        backward=local_loss_sum * (grad_average_degree / denominator),
        logged=logged / denominator,
        valid_tokens=valid_tokens,
    )
