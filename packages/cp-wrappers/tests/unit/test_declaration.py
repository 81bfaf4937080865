"""Every attention gets exactly one declared method, or every fault is reported at once and nothing changes."""

from typing import Any

import pytest
import torch

from cp_core import AllGatherStrategy, InvalidInputError, UnsupportedError
from cp_wrappers import (
    MethodDeclaration,
    apply_context_parallel,
    check_declarations,
    find_attention_boundaries,
    inner_wrapper,
    plan_boundaries,
    register_cp_model_spec,
    register_inner_wrapper,
    resolve_inner_wrapper,
    resolve_local_compute_fn,
    suggest_declarations,
)


class ToyAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Core(torch.nn.Module):
    """Attends, and has no mark of an attention."""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = ToyAttention()
        self.mlp = torch.nn.Linear(2, 2)


class DecoderBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cross_attn = ToyAttention()


class Toy(torch.nn.Module):
    def __init__(self, num_layers: int = 3, block: type[torch.nn.Module] = Block) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(block() for _ in range(num_layers))


@inner_wrapper
def own_method(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return target_module.forward


@inner_wrapper
def other_method(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, chunks: int = 1) -> Any:
    return target_module.forward


def local_compute(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, scale: float) -> Any:
    return lambda x: x * scale


def with_scale(scale: float) -> dict[str, Any]:
    return {"_target_": f"{__name__}.local_compute", "scale": scale}


def declared(*matches: str, inner_target: str | None = None) -> list[MethodDeclaration]:
    return [MethodDeclaration(match=match, inner_wrapper=own_method, inner_target=inner_target) for match in matches]


def planned(*matches: str, inner_target: str | None = None, model: torch.nn.Module | None = None) -> dict[str, str]:
    plans = plan_boundaries(model or Toy(), declared(*matches, inner_target=inner_target), cp_size=2)
    return {plan.fqn: plan.match for plan in plans}


def faults_of(*matches: str, inner_target: str | None = None, model: torch.nn.Module | None = None) -> list[str]:
    check = check_declarations(model or Toy(), declared(*matches, inner_target=inner_target), cp_size=2)
    return [fault.message for fault in check.faults]


NAMES = [f"layers.{index}.self_attn" for index in range(3)]
LISTED = ", ".join(NAMES)


# --- finding ------------------------------------------------------------------------------------------------------


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


# --- reaching -----------------------------------------------------------------------------------------------------


def test_a_star_crosses_dots() -> None:
    assert list(planned("*.self_attn")) == NAMES


def test_a_star_alone_means_the_attentions() -> None:
    assert list(planned("*", inner_target="self")) == NAMES
    assert list(planned("*")) == NAMES


def test_several_declarations_share_the_model() -> None:
    assert planned("layers.0.*", "layers.[12].self_attn") == {
        "layers.0.self_attn": "layers.0.*",
        "layers.1.self_attn": "layers.[12].self_attn",
        "layers.2.self_attn": "layers.[12].self_attn",
    }


def test_an_inner_target_is_relative_to_the_match() -> None:
    assert list(planned("layers.?", inner_target="self_attn")) == NAMES


def test_one_pattern_with_two_inner_targets_serves_two_attentions_of_a_block() -> None:
    declarations = [
        *declared("layers.?", inner_target="self_attn"),
        MethodDeclaration(match="layers.?", inner_target="cross_attn", inner_wrapper=other_method),
    ]
    plans = plan_boundaries(Toy(1, DecoderBlock), declarations, cp_size=2)
    assert {plan.fqn: plan.wrapper.name for plan in plans} == {
        "layers.0.self_attn": "own_method",
        "layers.0.cross_attn": "other_method",
    }


def test_an_inner_target_may_be_left_out_where_there_is_one_attention() -> None:
    assert list(planned("layers.?")) == NAMES


def test_an_inner_target_may_not_be_left_out_where_there_are_two() -> None:
    assert faults_of("layers.?", model=Toy(1, DecoderBlock)) == [
        "the declaration 'layers.?' leaves out inner_target, but layers.0 holds 2 attentions (layers.0.self_attn, "
        "layers.0.cross_attn); match each of them, or name one as inner_target."
    ]


def test_a_module_that_the_user_names_is_a_boundary_without_any_mark() -> None:
    model = Toy()
    for layer in model.layers:
        layer.core = Core()
    assert faults_of("layers.?", inner_target="core", model=model) == [
        f"3 of 3 attentions have no context-parallel method: {LISTED}; declare one for each."
    ]
    for layer in model.layers:
        layer.self_attn = torch.nn.Identity()
    assert list(planned("layers.?", inner_target="core", model=model)) == [f"layers.{index}.core" for index in range(3)]
    assert list(planned("*.core", inner_target="self", model=model)) == [f"layers.{index}.core" for index in range(3)]


def test_a_target_inside_an_attention_stands_for_it() -> None:
    model = Toy()
    for layer in model.layers:
        layer.self_attn.core_attn = Core()
    plans = plan_boundaries(model, declared("*.self_attn", inner_target="core_attn"), cp_size=2)
    assert [plan.fqn for plan in plans] == [f"{name}.core_attn" for name in NAMES]
    assert [plan.attentions for plan in plans] == [(layer.self_attn,) for layer in model.layers]


def test_a_mere_part_of_an_attention_does_not_stand_for_it() -> None:
    model = Toy()
    for layer in model.layers:
        layer.self_attn.q_proj = torch.nn.Linear(1, 1)
    first, second = faults_of("*.q_proj", inner_target="self", model=model)
    assert first.startswith(
        "the declaration '*.q_proj' reaches layers.0.self_attn.q_proj, a part of the attention layers.0.self_attn, "
        "which a method on it does not serve"
    )
    assert second.startswith("3 of 3 attentions have no context-parallel method")
    suggested = suggest_declarations(model, declared("*.q_proj", "*.self_attn", inner_target="self"), cp_size=2)
    assert suggested is not None
    assert [d.match for d in suggested.declarations] == ["*.self_attn"]


def test_a_target_around_one_attention_stands_for_it() -> None:
    assert list(planned("layers.?", inner_target="self")) == ["layers.0", "layers.1", "layers.2"]


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matches", "inner_target", "sentence"),
    [
        (["nothing.*"], None, f"the declaration 'nothing.*' matches no module; the model's attentions are {LISTED}."),
        (
            ["*.mlp"],
            None,
            "the declaration '*.mlp' matches layers.0.mlp, layers.1.mlp, layers.2.mlp, but none of these is an "
            f"attention; the model's attentions are {LISTED}.",
        ),
        (
            ["*.self_attn"],
            "core",
            f"the declaration '*.self_attn' matches {LISTED}, but none of these has an inner_target 'core'; the "
            f"model's attentions are {LISTED}.",
        ),
        (
            ["layers"],
            None,
            f"the declaration 'layers' leaves out inner_target, but layers holds 3 attentions ({LISTED}); match each "
            "of them, or name one as inner_target.",
        ),
        (
            ["layers"],
            "self",
            f"the declaration 'layers' reaches layers, which holds 3 attentions ({LISTED}); each attention has a "
            "method of its own, so match the attentions.",
        ),
        (
            ["*.self_attn", "layers.0.*"],
            None,
            "layers.0.self_attn is declared 2 times, by the declaration '*.self_attn', the declaration 'layers.0.*'; "
            "keep exactly one.",
        ),
        (
            ["*.self_attn", "*attn"],
            None,
            "layers.0.self_attn is declared 2 times, by the declaration '*.self_attn', the declaration '*attn'; keep "
            "exactly one. The same holds for layers.1.self_attn, layers.2.self_attn.",
        ),
        (
            ["layers.[12].self_attn"],
            None,
            "1 of 3 attentions have no context-parallel method: layers.0.self_attn; declare one for each.",
        ),
    ],
    ids=["dead-glob", "no-attention", "no-target", "ambiguous", "wide", "twice", "twice-everywhere", "undeclared"],
)
def test_a_wrong_pattern_is_said(matches: list[str], inner_target: str | None, sentence: str) -> None:
    assert sentence in faults_of(*matches, inner_target=inner_target)


def test_all_faults_are_reported_together() -> None:
    wrong = [
        *declared("layers.0.self_attn", "layers.0.*", "nothing.*"),
        MethodDeclaration(match="x", inner_wrapper="sdp"),
        MethodDeclaration(match="layers.1", inner_wrapper="sdpa_hf", local_compute_fn=local_compute),
        MethodDeclaration(match="layers.?.mlp", source="plan_overrides.5"),
    ]
    with pytest.raises(InvalidInputError) as caught:
        plan_boundaries(Toy(), wrong, cp_size=2)
    message = str(caught.value)
    for sentence in (
        "layers.0.self_attn is declared 2 times, by the declaration 'layers.0.self_attn', the declaration 'layers.0.*'",
        "the declaration 'nothing.*' matches no module",
        "the declaration 'x': no inner_wrapper is called 'sdp'",
        "the declaration 'layers.1' declares both inner_wrapper and local_compute_fn; keep one of them.",
        "plan_overrides.5 ('layers.?.mlp') names no method; add inner_wrapper",
        "1 of 3 attentions have no context-parallel method: layers.2.self_attn; declare one for each.",
    ):
        assert sentence in message


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no attention was found in Linear"):
        plan_boundaries(torch.nn.Linear(2, 2), declared("*"), cp_size=2)


@pytest.mark.parametrize("changes", [{"match": 3}, {"inner_target": 3}, {"inner_target": ""}])
def test_a_declaration_holds_text(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"must be a pattern|must be 'self' or a name"):
        MethodDeclaration(**{"match": "*", "inner_wrapper": own_method, **changes})


def test_the_model_itself_has_the_empty_name() -> None:
    plans = plan_boundaries(ToyAttention(), declared("", inner_target="self"), cp_size=2)
    assert [plan.fqn for plan in plans] == [""]


def test_a_forward_that_names_an_attention_function_is_an_attention() -> None:
    class Mixer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model = torch.nn.ModuleDict({"marked": ToyAttention(), "mixer": Mixer()})
    assert list(find_attention_boundaries(model)) == ["marked", "mixer"]


@pytest.mark.parametrize(
    ("strategy", "made"),
    [(lambda: None, "NoneType"), (lambda: 3, "int"), (lambda: AllGatherStrategy, "ABCMeta")],
    ids=["nothing", "a number", "a class"],
)
def test_a_strategy_that_is_none_is_refused(strategy: Any, made: str) -> None:
    @inner_wrapper(strategy=strategy)
    def wrapper(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any: ...

    with pytest.raises(InvalidInputError, match=f"must make a ContextParallelStrategy, but made a {made}"):
        plan_boundaries(Toy(), [MethodDeclaration(match="*.self_attn", inner_wrapper=wrapper)], cp_size=2)


def test_a_check_that_exits_is_said_too() -> None:
    def exiting_check(module: torch.nn.Module, fqn: str) -> None:
        raise SystemExit(5)

    @inner_wrapper(check=exiting_check)
    def wrapper(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any: ...

    with pytest.raises(InvalidInputError, match=r"checking 'wrapper' failed: SystemExit: 5"):
        plan_boundaries(Toy(), [MethodDeclaration(match="*.self_attn", inner_wrapper=wrapper)], cp_size=2)


def test_data_that_cannot_be_compared_is_no_fault_of_the_suggestion() -> None:
    target = f"{__name__}.other_method"
    declarations = [
        MethodDeclaration(match="layers.0.self_attn", inner_wrapper={"_target_": target, "chunks": torch.ones(2)}),
        MethodDeclaration(match="layers.1.self_attn", inner_wrapper={"_target_": target, "chunks": torch.ones(2)}),
    ]
    assert suggest_declarations(Toy(), declarations, cp_size=2) is not None


def test_a_check_that_fails_is_said_in_a_line() -> None:
    def broken_check(module: torch.nn.Module, fqn: str) -> None:
        raise KeyError("rope")

    @inner_wrapper(check=broken_check)
    def checked(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any: ...

    with pytest.raises(InvalidInputError, match=r"^layers\.0\.self_attn: checking 'checked' failed: KeyError: 'rope'"):
        plan_boundaries(Toy(), [MethodDeclaration(match="*.self_attn", inner_wrapper=checked)], cp_size=2)


# --- suggestions --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def a_method_that_serves_anything() -> None:
    register_inner_wrapper("any", other_method)


WRONG_DECLARATIONS: dict[str, list[MethodDeclaration]] = {
    "one missing": declared("layers.1.self_attn", "layers.2.self_attn"),
    "dead glob": declared("*.self_attn", "nothing"),
    "twice": declared("*.self_attn", "layers.0.*"),
    "ambiguous": declared("layers"),
    "both channels": [
        *declared("*.[01].self_attn"),
        MethodDeclaration(match="layers.2.self_attn", inner_wrapper=own_method, local_compute_fn=local_compute),
    ],
}


@pytest.mark.parametrize("declarations", WRONG_DECLARATIONS.values(), ids=WRONG_DECLARATIONS.keys())
def test_a_suggestion_works_and_keeps_what_was_declared(declarations: list[MethodDeclaration]) -> None:
    model = Toy()
    wrong = check_declarations(model, declarations, cp_size=2)
    assert wrong.faults
    suggested = suggest_declarations(model, declarations, cp_size=2)
    assert suggested is not None
    check = check_declarations(model, suggested.declarations, cp_size=2)
    assert not check.faults
    found = {plan.fqn: plan.wrapper.name for plan in check.plans}
    assert found.keys() == set(NAMES)
    assert found.items() >= {plan.fqn: plan.wrapper.name for plan in wrong.plans}.items()
    assert set(found.values()) <= {"own_method", *suggested.filled_in}


def test_one_method_for_all_is_suggested_as_one_pattern() -> None:
    suggested = suggest_declarations(Toy(), declared("*.self_attn", "layers.0.*", "nothing"), cp_size=2)
    assert suggested is not None
    assert [d.match for d in suggested.declarations] == ["*.self_attn"]
    assert suggested.filled_in == ()


def test_of_two_methods_the_more_specific_is_suggested() -> None:
    declarations = [*declared("*.self_attn"), MethodDeclaration(match="layers.1.*", inner_wrapper=other_method)]
    suggested = suggest_declarations(Toy(), declarations, cp_size=2)
    assert suggested is not None
    plans = plan_boundaries(Toy(), suggested.declarations, cp_size=2)
    assert [plan.wrapper.name for plan in plans] == ["own_method", "other_method", "own_method"]


def test_nothing_is_suggested_where_no_method_serves_an_attention() -> None:
    model = Toy()
    model.layers.append(torch.nn.LSTM(2, 2))
    assert suggest_declarations(model, declared("nothing"), cp_size=2) is None


# --- channels, names ----------------------------------------------------------------------------------------------


def test_a_local_compute_fn_is_a_method_by_itself() -> None:
    declaration = MethodDeclaration(match="*.self_attn", local_compute_fn=with_scale(2.0))
    plans = plan_boundaries(Toy(), [declaration], cp_size=2)
    assert [plan.wrapper.channel for plan in plans] == ["local_compute_fn"] * 3


@pytest.mark.parametrize(
    ("declaration", "sentence"),
    [
        ("sdpa_hf", "local_compute_fn 'sdpa_hf' is an inner_wrapper; declare it as inner_wrapper: sdpa_hf."),
        ("nowhere", "'nowhere' is neither a registered name nor a path such as package.module.name."),
        (f"{__name__}.local_compute", "takes scale; unknown: none; missing: scale"),
        (lambda module: module, "must take target_module, mesh, tp_mesh, cp_mesh, ep_mesh without defaults; missing"),
        ({"_target_": f"{__name__}.local_compute", "scale": 1.0, "mesh": 2}, "mesh is filled in at apply"),
        ([], "local_compute_fn must be a name, a mapping with _target_ or a function, but got list."),
        ({"scale": 1.0}, "a mapping under local_compute_fn needs _target_"),
    ],
    ids=["a-wrapper", "no-path", "missing-data", "no-context", "reserved", "a-list", "no-target"],
)
def test_a_wrong_local_compute_fn_is_refused(declaration: Any, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        resolve_local_compute_fn(declaration)
    assert sentence in str(caught.value)


def test_a_user_registers_a_name() -> None:
    register_inner_wrapper("my_cp_wrapper", own_method)
    register_inner_wrapper("my_cp_wrapper", own_method)
    assert resolve_inner_wrapper("my_cp_wrapper").function is own_method
    with pytest.raises(InvalidInputError, match="'my_cp_wrapper' is registered already"):
        register_inner_wrapper("my_cp_wrapper", other_method)
    with pytest.raises(InvalidInputError, match="'sdpa_hf' is registered already"):
        register_inner_wrapper("sdpa_hf", own_method)
    with pytest.raises(InvalidInputError, match=r"must be an identifier, but is 'a\.b'"):
        register_inner_wrapper("a.b", own_method)
    with pytest.raises(InvalidInputError, match="decorate the function with @inner_wrapper"):
        register_inner_wrapper("local_compute", local_compute)


# --- cp size 1 ----------------------------------------------------------------------------------------------------


def test_one_rank_wraps_nothing() -> None:
    model = Toy()
    applied = apply_context_parallel(model, None, {"no such module": "no such wrapper"})
    assert applied.report == ()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_at_cp_size_1_an_attention_needs_no_method_and_a_strategy_is_not_planned() -> None:
    declarations = [MethodDeclaration(match="*.0.self_attn", inner_wrapper="sdpa_hf"), *declared("*.1.self_attn")]
    check = check_declarations(Toy(), declarations, cp_size=1)
    assert check.faults == ()
    assert [plan.fqn for plan in check.plans] == ["layers.1.self_attn"]


# --- model specs --------------------------------------------------------------------------------------------------


def with_model_type(model_type: str) -> Toy:
    model = Toy()
    model.config = type("Config", (), {"model_type": model_type})()
    return model


def test_a_spec_says_where_the_attentions_are() -> None:
    register_cp_model_spec(architecture="toy_with_spec", attention_targets=("layers.?",))
    assert list(find_attention_boundaries(with_model_type("toy_with_spec"))) == [f"layers.{i}" for i in range(3)]


def test_a_spec_holds_for_its_family_inside_another_model() -> None:
    register_cp_model_spec(architecture="toy_inside", attention_targets=("layers.0",))
    both = torch.nn.ModuleDict({"actor": with_model_type("toy_inside"), "critic": Toy(1)})
    assert list(find_attention_boundaries(both)) == [
        "actor.layers.0",
        "actor.layers.1.self_attn",
        "actor.layers.2.self_attn",
        "critic.layers.0.self_attn",
    ]


def test_a_second_spec_of_one_architecture_must_be_equal() -> None:
    register_cp_model_spec(architecture="toy_twice", attention_targets=("*.attn",))
    register_cp_model_spec(architecture="toy_twice", attention_targets=("*.attn",))
    with pytest.raises(InvalidInputError, match="has a different model spec already"):
        register_cp_model_spec(architecture="toy_twice", attention_targets=("*.other",))


def test_a_spec_that_matches_nothing_is_an_error() -> None:
    register_cp_model_spec(architecture="toy_elsewhere", attention_targets=("*.core_attention",))
    model = with_model_type("toy_elsewhere")
    with pytest.raises(InvalidInputError, match="match no module of Toy"):
        find_attention_boundaries(model)
    assert any("match no module of Toy" in fault for fault in faults_of("*.self_attn", model=model))


def test_a_spec_cannot_make_an_attention_disappear() -> None:
    register_cp_model_spec(architecture="toy_partial", attention_targets=("*.0.self_attn",))
    assert list(find_attention_boundaries(with_model_type("toy_partial"))) == NAMES


@pytest.mark.parametrize("name", ["attention_targets", "wrappers"])
def test_text_for_a_tuple_is_refused(name: str) -> None:
    arguments = {"architecture": "toy_text", "attention_targets": ("*.attn",), name: "*.self_attn"}
    with pytest.raises(InvalidInputError, match=rf"{name} of the model spec of 'toy_text' must be a tuple, such as"):
        register_cp_model_spec(**arguments)


def test_a_spec_without_targets_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="names no attention_targets"):
        register_cp_model_spec(architecture="toy_empty", attention_targets=())


def test_kinds_of_errors_are_also_builtin_kinds() -> None:
    assert issubclass(InvalidInputError, ValueError)
    assert issubclass(UnsupportedError, NotImplementedError)
