"""The global batches of a step, as one device would be given them; shares no code with the batch contract.

B batch, S real global length.
"""

from dataclasses import dataclass
from typing import Any

import torch

_IGNORED = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatch:
    """One micro-batch of one data-parallel rank, whole."""

    dp_rank: int
    micro_batch: int
    # Keyword arguments of the model, on the host.
    inputs: dict[str, Any]
    # [B, S], shifted on the whole sequence.
    shift_labels: torch.Tensor
    # [B, S], False for a pad.
    real: torch.Tensor

    @property
    def weight(self) -> float:
        """What this batch adds to the denominator of the loss: its labels, or the sum of its loss weights."""
        weights = self.inputs.get("loss_weights")
        return float(self.valid_tokens if weights is None else weights.double().sum())

    @property
    def valid_tokens(self) -> int:
        """Labels that are not -100."""
        return int((self.shift_labels != _IGNORED).sum())


def global_batch(batch: dict[str, Any], *, dp_rank: int, micro_batch: int) -> GlobalBatch:
    """Return what one device computes for a batch of the data stream.

    Args:
        batch: `input_ids` `[B, S]` or `inputs_embeds` `[B, S, H]`, `labels` or `shift_labels`, and more.
        dp_rank, micro_batch: Where it belongs.
    """
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
    tokens = batch["inputs_embeds"] if batch.get("input_ids") is None else batch["input_ids"]
    shape = tokens.shape[:2]
    real = _real(batch.get("attention_mask"), shape)
    if bool(real.all()):
        inputs.pop("attention_mask", None)
    if inputs.get("position_ids") is None:
        inputs["position_ids"] = torch.arange(shape[1]).expand(shape)
    shift_labels = _shift_labels(batch, real)
    if inputs.get("loss_weights") is not None:
        weights = inputs["loss_weights"]
        shifted = weights if "labels" not in batch else torch.nn.functional.pad(weights[:, 1:], (0, 1))
        inputs["loss_weights"] = shifted.masked_fill(shift_labels == _IGNORED, 0)
    return GlobalBatch(dp_rank=dp_rank, micro_batch=micro_batch, inputs=inputs, shift_labels=shift_labels, real=real)


def _real(mask: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    return mask == 0 if mask.is_floating_point() and bool((mask < 0).any()) else mask.bool()


def _shift_labels(batch: dict[str, Any], real: torch.Tensor) -> torch.Tensor:
    labels: torch.Tensor | None = batch.get("labels")
    if labels is None:
        given: torch.Tensor = batch["shift_labels"]
        return given.long()
    shifted = torch.full_like(labels, _IGNORED, dtype=torch.long)
    shifted[:, :-1] = labels[:, 1:]
    return shifted.masked_fill(~real, _IGNORED)
