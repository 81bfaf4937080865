"""From the entries of `plan_overrides` to one spec per pattern, or every fault of the entries at once."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cp_core import InvalidInputError

from ._plan import ModuleShardingSpec

_logger = logging.getLogger("cp_trainer_glue")


class OverrideEntry(Protocol):
    """One entry of `plan_overrides` as the config holds it."""

    @property
    def match(self) -> str:
        """fnmatch pattern of full module names; `*` crosses dots."""
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
        """A registered name, or a mapping with `_target_`."""
        ...

    @property
    def local_compute_fn(self) -> str | Mapping[str, Any] | None:
        """A factory of the whole local computation."""
        ...

    @property
    def region_dispatch(self) -> bool | None:
        """Must be false at cp size above 1."""
        ...


class PlanOverrideResolver:
    """Decides which entries hold in this run and turns them into specs.

    Args:
        entries: The user's `plan_overrides`, in order.
    """

    def __init__(self, entries: Sequence[OverrideEntry]) -> None:
        self._entries = entries

    def resolve(self, *, cp_size: int) -> dict[str, ModuleShardingSpec]:
        """Return the specs that hold at this cp size, by pattern.

        At cp size 1 entries with `when: cp` are skipped, with an INFO line each.

        Raises:
            InvalidInputError: If two entries have one pattern.
        """
        specs: dict[str, ModuleShardingSpec] = {}
        twice = []
        for entry in self._entries:
            if entry.when == "cp" and cp_size == 1:
                _logger.info("cp_size is 1: skipping plan_overrides entry %r (when: cp).", entry.match)
                continue
            if entry.match in specs:
                twice.append(entry.match)
            specs[entry.match] = ModuleShardingSpec(
                inner_target=entry.inner_target,
                inner_wrapper=entry.inner_wrapper,
                local_compute_fn=entry.local_compute_fn,
                region_dispatch=entry.region_dispatch,
            )
        if twice:
            raise InvalidInputError(
                f"plan_overrides declares {', '.join(map(repr, twice))} more than once; keep one entry for each match."
            )
        return specs
