"""Every attention gets exactly one declared method, or every fault is reported at once and nothing changes."""

from typing import Any

import pytest
import torch

from cp_core import InvalidInputError, UnsupportedError
from cp_wrappers import (
    MethodDeclaration,
    apply_context_parallel,
    find_attention_boundaries,
    inner_wrapper,
    plan_boundaries,
    register_cp_model_spec,
)


class ToyAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = ToyAttention()
        self.mlp = torch.nn.Linear(2, 2)


class Toy(torch.nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(num_layers))


@inner_wrapper
def own_method(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return target_module.forward


def declared(*matches: str, inner_target: str | None = None) -> list[MethodDeclaration]:
    return [MethodDeclaration(match=match, inner_wrapper=own_method, inner_target=inner_target) for match in matches]


def planned(*matches: str, inner_target: str | None = None) -> dict[str, str]:
    plans = plan_boundaries(Toy(), declared(*matches, inner_target=inner_target), cp_mesh=None)
    return {plan.fqn: plan.match for plan in plans}


NAMES = [f"layers.{index}.self_attn" for index in range(3)]


def test_attentions_are_found_by_their_marks() -> None:
    assert list(find_attention_boundaries(Toy())) == NAMES


def test_the_innermost_of_nested_attentions_is_the_boundary() -> None:
    class OuterAttention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self = ToyAttention()

    assert list(find_attention_boundaries(torch.nn.Sequential(OuterAttention()))) == ["0.self"]


def test_multihead_attention_of_torch_is_found() -> None:
    assert list(find_attention_boundaries(torch.nn.Sequential(torch.nn.MultiheadAttention(2, 1)))) == ["0"]


def test_a_star_crosses_dots() -> None:
    assert list(planned("*.self_attn")) == NAMES


def test_several_declarations_share_the_model() -> None:
    assert planned("layers.0.*", "layers.[12].self_attn") == {
        "layers.0.self_attn": "layers.0.*",
        "layers.1.self_attn": "layers.[12].self_attn",
        "layers.2.self_attn": "layers.[12].self_attn",
    }


def test_an_inner_target_is_relative_to_the_match() -> None:
    assert list(planned("layers.?", inner_target="self_attn")) == NAMES


def test_an_inner_target_may_be_left_out_where_there_is_one_attention() -> None:
    assert list(planned("layers.?")) == NAMES


def test_the_model_as_a_whole_is_no_match_for_three_attentions() -> None:
    with pytest.raises(InvalidInputError, match=r"the pattern 'layers' .* reaches no attention"):
        planned("layers")


def test_all_faults_are_reported_together() -> None:
    wrong = [
        *declared("layers.0.self_attn", "layers.0.*", "nothing.*"),
        MethodDeclaration(match="x", inner_wrapper="sdp"),
    ]
    with pytest.raises(InvalidInputError) as caught:
        plan_boundaries(Toy(), wrong, cp_mesh=None)
    message = str(caught.value)
    for sentence in (
        "layers.0.self_attn is declared 2 times, by layers.0.self_attn, layers.0.*; keep exactly one.",
        "the pattern 'nothing.*' (inner_target left out) reaches no attention",
        "no inner_wrapper is called 'sdp'",
        "2 of 3 attentions have no context-parallel method: layers.1.self_attn, layers.2.self_attn.",
    ):
        assert sentence in message


def test_the_suggested_entries_reach_exactly_what_is_missing() -> None:
    import re

    with pytest.raises(InvalidInputError) as caught:
        plan_boundaries(Toy(), declared("layers.1.self_attn"), cp_mesh=None)
    suggested = re.findall(r'match: "([^"]+)"', str(caught.value))
    assert sorted(planned("layers.1.self_attn", *suggested, inner_target="self")) == NAMES


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no attention was found in Linear"):
        plan_boundaries(torch.nn.Linear(2, 2), declared("*"), cp_mesh=None)


def test_one_rank_wraps_nothing() -> None:
    model = Toy()
    applied = apply_context_parallel(model, None, {"no such module": "no such wrapper"})
    assert applied.report == ()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_spec_says_where_the_attentions_are() -> None:
    model = Toy()
    model.config = type("Config", (), {"model_type": "toy_with_spec"})()
    register_cp_model_spec(architecture="toy_with_spec", attention_targets=("*.mlp",))
    assert list(find_attention_boundaries(model)) == [f"layers.{index}.mlp" for index in range(3)]


def test_a_second_spec_of_one_architecture_must_be_equal() -> None:
    register_cp_model_spec(architecture="toy_twice", attention_targets=("*.attn",))
    register_cp_model_spec(architecture="toy_twice", attention_targets=("*.attn",))
    with pytest.raises(InvalidInputError, match="has a different model spec already"):
        register_cp_model_spec(architecture="toy_twice", attention_targets=("*.other",))


def test_a_spec_that_matches_nothing_is_an_error() -> None:
    model = Toy()
    model.config = type("Config", (), {"model_type": "toy_elsewhere"})()
    register_cp_model_spec(architecture="toy_elsewhere", attention_targets=("*.core_attention",))
    with pytest.raises(InvalidInputError, match="match no module of Toy"):
        find_attention_boundaries(model)


def test_a_spec_without_targets_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="names no attention_targets"):
        register_cp_model_spec(architecture="toy_empty", attention_targets=())


def test_kinds_of_errors_are_also_builtin_kinds() -> None:
    assert issubclass(InvalidInputError, ValueError)
    assert issubclass(UnsupportedError, NotImplementedError)
