"""The loss of a causal language model as a sum over tokens."""

import torch


def token_loss_sum(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of the tokens that have a label.

    Args:
        logits: `[B, L, V]`.
        shift_labels: `[B, L]`, -100 where nothing is to predict.

    Returns:
        0-d, in fp32 or wider; 0 if no token has a label.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(
        wide.flatten(0, 1), shift_labels.flatten(), reduction="sum", ignore_index=-100
    )
