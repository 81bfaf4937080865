"""What `verify` found, for people and programs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ._cause import Cause
from ._check import Check


class Firsts(NamedTuple):
    """What disagrees first; None where nothing does."""

    layer: str | None
    # In words: position, row, data-parallel rank and micro-batch, context-parallel rank.
    token: str | None
    parameter: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """Every comparison of a declared run with one device."""

    checks: tuple[Check, ...]
    causes: tuple[Cause, ...]
    # What was changed of the user's config and model, a line each.
    changes: tuple[str, ...]
    # Where the first token that disagrees stands, in words; empty if none does.
    first_token: str
    # Class of the model, and the ranks in words.
    model: str
    ranks: str
    num_steps: int
    num_parameters: int
    # Entries of all parameters.
    num_entries: int
    # Tokens of one step, and those of them that have a label.
    num_tokens: int
    num_labels: int

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed, in the order in which a step computes."""
        return tuple(check for check in self.checks if not check.passed)

    def first(self, *kinds: str) -> Check | None:
        """Return the first check of some kinds that failed."""
        return next((check for check in self.failed if check.kind in kinds), None)

    def of_kind(self, kind: str) -> tuple[Check, ...]:
        """Return all checks of a kind."""
        return tuple(check for check in self.checks if check.kind == kind)

    @property
    def firsts(self) -> Firsts:
        """The first layer, token and parameter that disagree."""
        layer = self.first("layer", "logits")
        parameter = self.first("gradient", "clipped_gradient", "parameter")
        return Firsts(
            layer=None if layer is None else layer.name,
            token=self.first_token or None,
            parameter=None if parameter is None else parameter.name,
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as plain content."""
        firsts = self.firsts
        return {
            "passed": self.passed,
            "checks": [check.as_json() for check in self.checks],
            "causes": [cause.as_json() for cause in self.causes],
            "first_layer": firsts.layer,
            "first_parameter": firsts.parameter,
            "first_token": firsts.token,
            "changed": list(self.changes),
            "model": self.model,
            "ranks": self.ranks,
            "steps": self.num_steps,
        }


def largest_error(checks: Sequence[Check]) -> float:
    """Return the largest error, infinite if one is no number."""
    return max((math.inf if math.isnan(check.error) else check.error for check in checks), default=0.0)
