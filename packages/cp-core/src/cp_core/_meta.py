"""What a strategy is told: the heads it works on, the attention it must compute, the layer that asks."""

from dataclasses import dataclass

import torch

from cp_collectives import InvalidInputError

from ._launch_state import LaunchState
from ._layout import SequenceLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """One attention with the heads that this rank has of it, after tensor parallelism.

    Raises:
        InvalidInputError: If query heads are not a multiple of key/value heads, naming both.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    # Fully qualified module name, for errors.
    fqn: str
    # Keys a query sees at most, itself included; None for all.
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise InvalidInputError(
                f"{self.fqn}: num_q_heads ({self.num_q_heads}) must be a positive multiple of num_kv_heads "
                f"({self.num_kv_heads})."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMeta:
    """The attention to compute, in global coordinates. A strategy honours each field or refuses it by name.

    Raises:
        InvalidInputError: If the window is less than 1.
    """

    layout: SequenceLayout
    causal: bool = True
    # Multiplies the scores; None is 1 / sqrt(D).
    scale: float | None = None
    # Keys a query sees at most, itself included, pads not; 1 or more.
    window: int | None = None
    # Scores become softcap * tanh(scores / softcap).
    softcap: float | None = None
    # [N], a logit per query head that takes part in the softmax and carries no value.
    sinks: torch.Tensor | None = None
    dropout_p: float = 0.0
    # Additive or bool (True = visible) mask in global coordinates.
    mask: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InvalidInputError(f"window counts the keys a query sees, itself included, but got {self.window}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffMeta:
    """Who launches: the layer, its attention, and the state of an earlier launch to add to."""

    layer: str | None
    attention_meta: AttentionMeta
    state: LaunchState | None = None
