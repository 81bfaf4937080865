"""The global batches of a step, as one device would be given them; shares no code with the batch contract.

B batch, S real global length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -100


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
    # [B, S], what each token's loss is multiplied with, shifted as the labels; None where each weighs 1.
    loss_weights: torch.Tensor | None = None

    @property
    def valid_tokens(self) -> int:
        """Labels that are not -100."""
        return int((self.shift_labels != IGNORED).sum())


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
    return GlobalBatch(
        dp_rank=dp_rank,
        micro_batch=micro_batch,
        inputs=inputs,
        shift_labels=shift_labels,
        real=real,
        loss_weights=_shift_weights(inputs.pop("loss_weights", None), shift_labels, with_labels="labels" in batch),
    )


def joined(batches: Sequence[GlobalBatch]) -> GlobalBatch | None:
    """Return the batches of all data-parallel ranks as one of more rows, None if they do not fit together."""
    first = batches[0]
    masked = any("attention_mask" in batch.inputs for batch in batches)
    fields = [{**batch.inputs, **({"attention_mask": batch.real.long()} if masked else {})} for batch in batches]
    rows = [{**own, "shift_labels": batch.shift_labels} for own, batch in zip(fields, batches, strict=True)]
    weighted = {batch.loss_weights is None for batch in batches}
    if len({_kind(row) for row in rows}) > 1 or len(weighted) > 1:
        return None
    whole = [batch.loss_weights for batch in batches if batch.loss_weights is not None]
    return GlobalBatch(
        dp_rank=first.dp_rank,
        micro_batch=first.micro_batch,
        inputs={name: _cat([own[name] for own in fields]) for name in fields[0]},
        shift_labels=torch.cat([batch.shift_labels for batch in batches]),
        real=torch.cat([batch.real for batch in batches]),
        loss_weights=torch.cat(whole) if whole else None,
    )


def _kind(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, value.shape[1:] if _has_rows(value) else repr(value)) for name, value in sorted(row.items()))


def _cat(values: Sequence[Any]) -> Any:
    return torch.cat(list(values)) if _has_rows(values[0]) else values[0]


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _shift_weights(
    weights: torch.Tensor | None, shift_labels: torch.Tensor, *, with_labels: bool
) -> torch.Tensor | None:
    if weights is None:
        return None
    shifted = torch.nn.functional.pad(weights[:, 1:], (0, 1)) if with_labels else weights
    return shifted.masked_fill(shift_labels == IGNORED, 0)


def _real(mask: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    return mask == 0 if mask.is_floating_point() and bool((mask < 0).any()) else mask.bool()


def _shift_labels(batch: dict[str, Any], real: torch.Tensor) -> torch.Tensor:
    labels: torch.Tensor | None = batch.get("labels")
    if labels is None:
        given: torch.Tensor = batch["shift_labels"]
        return given.long()
    shifted = torch.full_like(labels, IGNORED, dtype=torch.long)
    shifted[:, :-1] = labels[:, 1:]
    return shifted.masked_fill(~real, IGNORED)
