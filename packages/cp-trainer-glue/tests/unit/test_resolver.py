"""Entries of `plan_overrides` become specs, or are skipped with a line that says so."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cp_trainer_glue import ModuleShardingSpec, PlanOverrideResolver


@dataclass(frozen=True)
class Entry:
    match: str = "*.self_attn"
    when: str | None = "cp"
    inner_target: str | None = "self"
    inner_wrapper: str | Mapping[str, Any] | None = "sdpa_hf"
    local_compute_fn: str | Mapping[str, Any] | None = None
    region_dispatch: bool | None = False


SPEC = ModuleShardingSpec(inner_target="self", inner_wrapper="sdpa_hf", region_dispatch=False)


def test_an_entry_becomes_a_spec_that_knows_where_it_stands() -> None:
    first, second = PlanOverrideResolver([Entry(), Entry(match="*.cross_attn")]).resolve(cp_size=2)
    assert (first.match, first.spec, first.source) == ("*.self_attn", SPEC, "plan_overrides.0")
    assert (second.match, second.source) == ("*.cross_attn", "plan_overrides.1")


def test_when_cp_is_skipped_at_cp_size_1_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cp_trainer_glue"):
        assert PlanOverrideResolver([Entry()]).resolve(cp_size=1) == ()
    assert caplog.messages == ["cp_size is 1: skipping plan_overrides entry '*.self_attn' (when: cp)."]


def test_an_entry_without_when_always_holds() -> None:
    (override,) = PlanOverrideResolver([Entry(when="cp"), Entry(match="*.mine", when=None)]).resolve(cp_size=1)
    assert (override.match, override.source) == ("*.mine", "plan_overrides.1")


def test_looking_at_what_holds_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cp_trainer_glue"):
        assert PlanOverrideResolver([Entry()]).holding(cp_size=1) == ()
    assert caplog.messages == []
