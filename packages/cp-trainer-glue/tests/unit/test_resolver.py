"""Entries of `plan_overrides` become specs, or are skipped with a line that says so."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cp_core import InvalidInputError
from cp_trainer_glue import ModuleShardingSpec, PlanOverrideResolver


@dataclass(frozen=True)
class Entry:
    match: str = "*.self_attn"
    when: str | None = "cp"
    inner_target: str | None = "self"
    inner_wrapper: str | Mapping[str, Any] | None = "sdpa_hf"
    local_compute_fn: str | Mapping[str, Any] | None = None
    region_dispatch: bool | None = False


def test_an_entry_becomes_the_spec_of_its_pattern() -> None:
    assert PlanOverrideResolver([Entry()]).resolve(cp_size=2) == {
        "*.self_attn": ModuleShardingSpec(inner_target="self", inner_wrapper="sdpa_hf", region_dispatch=False)
    }


def test_when_cp_is_skipped_at_cp_size_1_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cp_trainer_glue"):
        assert PlanOverrideResolver([Entry()]).resolve(cp_size=1) == {}
    assert caplog.messages == ["cp_size is 1: skipping plan_overrides entry '*.self_attn' (when: cp)."]


def test_an_entry_without_when_always_holds() -> None:
    assert list(PlanOverrideResolver([Entry(when=None)]).resolve(cp_size=1)) == ["*.self_attn"]


def test_two_entries_with_one_pattern_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"declares '\*\.self_attn' more than once"):
        PlanOverrideResolver([Entry(), Entry(inner_wrapper="sdpa_qkv")]).resolve(cp_size=2)
