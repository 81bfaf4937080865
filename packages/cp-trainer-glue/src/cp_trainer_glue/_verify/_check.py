"""One comparison of the declared run with one device, and how much may differ (design.md, section 6)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerances:
    """Relative errors that rounding explains."""

    # Outputs of layers and logits, per token, of the largest token.
    output: float
    loss: float
    grad_norm: float
    # Of a gradient's own norm, and of the largest gradient's norm: what is zero but for rounding has no own scale.
    gradient: float
    gradient_floor: float
    parameter: float

    @property
    def match(self) -> float:
        """How near an explanation must come to the numbers that it explains.

        Norms that compute in fp32 round the gradient of a part otherwise than that of the whole, also where all else is
        float64.
        """
        return max(10 * self.gradient, 1e-6)


_TABLE: Mapping[torch.dtype, Tolerances] = {
    torch.float64: Tolerances(
        output=1e-10, loss=1e-12, grad_norm=1e-10, gradient=1e-10, gradient_floor=1e-14, parameter=1e-10
    ),
    torch.float32: Tolerances(
        output=1e-4, loss=1e-5, grad_norm=1e-4, gradient=1e-3, gradient_floor=1e-6, parameter=1e-5
    ),
    torch.float16: Tolerances(
        output=2e-2, loss=5e-3, grad_norm=2e-2, gradient=5e-2, gradient_floor=1e-3, parameter=5e-3
    ),
    torch.bfloat16: Tolerances(
        output=1e-1, loss=2e-2, grad_norm=1e-1, gradient=2e-1, gradient_floor=1e-2, parameter=2e-2
    ),
}


def tolerances_of(model: torch.nn.Module, *, computed_in: Sequence[str | None] = ()) -> Tolerances:
    """Return what may differ in a model, by its narrowest parameter and the dtypes in which FSDP computes and sums."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtypes |= {getattr(torch, name) for name in computed_in if name}
    known = [dtype for dtype in dtypes if dtype in _TABLE]
    return _TABLE[max(known, key=lambda dtype: torch.finfo(dtype).eps)] if known else _TABLE[torch.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The first token that disagrees."""

    # Position in the global sequence, and row of the micro-batch.
    position: int
    row: int
    dp_rank: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One comparison."""

    name: str
    # inputs, positions, labels, layer, logits, loss, valid_tokens, gradient, replicas, grad_norm, clipped_gradient,
    # parameter, optimizer or pending.
    kind: str
    step: int
    # Relative; infinite where one side has nothing to compare.
    error: float
    limit: float = 0.0
    # What was found, where a number does not say it.
    detail: str = ""
    # The first token that disagrees, for outputs of layers.
    place: Place | None = None

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; one that is no number is not."""
        return self.error <= self.limit

    def as_json(self) -> dict[str, Any]:
        """Return it as plain content."""
        content: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "error": self.error if math.isfinite(self.error) else None,
            "passed": self.passed,
            "step": self.step,
            "limit": self.limit,
        }
        if self.detail:
            content["detail"] = self.detail
        if self.place is not None:
            content["first_token"] = {name: getattr(self.place, name) for name in Place.__dataclass_fields__}
        return content


def relative_error(found: float, expected: float) -> float:
    """Return the error of a number relative to what was expected."""
    if found == expected:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else math.inf


def distance(found: torch.Tensor, expected: torch.Tensor, *, floor: float = 0.0) -> float:
    """Return the norm of the difference relative to the expected norm, or to a floor where that is larger."""
    scale = max(float(expected.double().norm()), floor)
    difference = float((found.double() - expected.double()).norm())
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf


def some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
