"""From the entries of `plan_overrides` to those that hold in a run."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cp_core import InvalidInputError

from ._plan import ModuleShardingSpec, ResolvedOverride

_logger = logging.getLogger("cp_trainer_glue")


class OverrideEntry(Protocol):
    """One entry of `plan_overrides` as the config holds it."""

    @property
    def match(self) -> str:
        """fnmatch pattern of module names; `*` crosses dots."""
        ...

    @property
    def when(self) -> str | None:
        """`"cp"`: only at cp size above 1; None: always."""
        ...

    @property
    def inner_target(self) -> str | None:
        """The attention, relative to the matched module."""
        ...

    @property
    def inner_wrapper(self) -> str | Mapping[str, Any] | None:
        """A registered name or a path, or a mapping with `_target_`."""
        ...

    @property
    def local_compute_fn(self) -> str | Mapping[str, Any] | None:
        """A factory of the whole local computation: a path, or a mapping with `_target_`."""
        ...

    @property
    def region_dispatch(self) -> bool | None:
        """Must be false at cp size above 1."""
        ...


class PlanOverrideResolver:
    """Decides which entries hold in this run and turns them into specs.

    Args:
        entries: The user's `plan_overrides`, in order.

    Raises:
        InvalidInputError: If an entry is something else.
    """

    def __init__(self, entries: Sequence[OverrideEntry]) -> None:
        for entry in entries:
            if not hasattr(entry, "when") or entry.when not in (None, "cp"):
                raise InvalidInputError(
                    f'an entry of plan_overrides must have match, when ("cp" or None) and a method, but is {entry!r}; '
                    "take the plan_overrides of a TrainerConfig."
                )
        self._entries = entries

    def resolve(self, *, cp_size: int) -> tuple[ResolvedOverride, ...]:
        """Return the entries that hold at this cp size, in order.

        At cp size 1 entries with `when: cp` are skipped, with an INFO line each.
        """
        for entry in self._entries:
            if not _holds(entry, cp_size):
                _logger.info("cp_size is 1: skipping plan_overrides entry %r (when: cp).", entry.match)
        return self.holding(cp_size=cp_size)

    def holding(self, *, cp_size: int) -> tuple[ResolvedOverride, ...]:
        """Return what `resolve` does, and log nothing."""
        return tuple(
            ResolvedOverride(match=entry.match, spec=_spec(entry), source=f"plan_overrides.{index}")
            for index, entry in enumerate(self._entries)
            if _holds(entry, cp_size)
        )


def _holds(entry: OverrideEntry, cp_size: int) -> bool:
    return entry.when != "cp" or cp_size > 1


def _spec(entry: OverrideEntry) -> ModuleShardingSpec:
    return ModuleShardingSpec(
        inner_target=entry.inner_target,
        inner_wrapper=entry.inner_wrapper,
        local_compute_fn=entry.local_compute_fn,
        region_dispatch=entry.region_dispatch,
        # Not in the owner's document, so an entry that is no PlanOverride may lack them.
        input_placements=getattr(entry, "input_placements", None),
        output_placements=getattr(entry, "output_placements", None),
    )
