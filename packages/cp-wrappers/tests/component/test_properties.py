"""Random declarations over random module trees: a valid one plans each attention once and alike on all ranks, an
invalid one stops all ranks with one message and leaves the model as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from cp_collectives import gather_objects
from cp_wrappers import (
    MethodDeclaration,
    apply_context_parallel,
    check_declarations,
    find_attention_boundaries,
    inner_wrapper,
    register_inner_wrapper,
    suggest_declarations,
)

# Every rank draws the same examples; shrinking would not, since it depends on what a rank sees.
ON_RANKS = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class ToyAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@inner_wrapper
def returning(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    original = target_module.forward
    return lambda x: original(x)


@inner_wrapper
def in_place(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, chunks: int = 1) -> None:
    original = target_module.forward
    target_module.forward = lambda x: original(x)


@inner_wrapper
def failing(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> None:
    raise RuntimeError("a user's wrapper failed")


def local_compute(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return lambda x: x


METHODS: list[dict[str, Any]] = [
    {"inner_wrapper": returning},
    {"inner_wrapper": in_place},
    {"inner_wrapper": {"_target_": f"{__name__}.in_place", "chunks": 2}},
    {"local_compute_fn": local_compute},
    {"local_compute_fn": {"_target_": f"{__name__}.local_compute"}},
]

leaves = st.sampled_from(["attention", "attention", "linear"])
child_names = st.sampled_from(["self_attn", "layers", "0", "1", "10", "block", "a*b", "c[d]", "core"])
trees = st.recursive(leaves, lambda inner: st.dictionaries(child_names, inner, min_size=1, max_size=4), max_leaves=12)


def built(tree: Any) -> torch.nn.Module:
    if tree == "attention":
        return ToyAttention()
    if tree == "linear":
        return torch.nn.Linear(1, 1)
    return torch.nn.ModuleDict({name: built(inner) for name, inner in tree.items()})


def literal(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


@st.composite
def declared_models(draw: Callable[..., Any]) -> tuple[torch.nn.Module, list[MethodDeclaration]]:
    """Draw a model and declarations that reach each of its attentions once."""
    model = torch.nn.ModuleDict({"model": built(draw(trees))})
    names = list(find_attention_boundaries(model))
    by_last: dict[str, list[str]] = {}
    for name in names:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    declarations = []
    for last, members in by_last.items():
        every = [name for name, _ in model.named_modules() if name.endswith(f".{last}")]
        if every == members and draw(st.booleans()):
            target = draw(st.sampled_from(["self", None]))
            declarations.append(declaration(draw, f"*.{literal(last)}", target))
            continue
        for name in members:
            parent = name.rpartition(".")[0]
            if draw(st.booleans()):
                declarations.append(declaration(draw, literal(parent), last))
            else:
                declarations.append(declaration(draw, literal(name), draw(st.sampled_from(["self", None]))))
    return model, draw(st.permutations(declarations))


def declaration(draw: Callable[..., Any], match: str, target: str | None) -> MethodDeclaration:
    return MethodDeclaration(match=match, inner_target=target, **draw(st.sampled_from(METHODS)))


@st.composite
def wrong_models(draw: Callable[..., Any]) -> tuple[torch.nn.Module, list[MethodDeclaration]]:
    """Draw a valid model and break its declarations in one way."""
    model, declarations = draw(declared_models())
    if not declarations:
        return model, [MethodDeclaration(match="*", inner_wrapper=returning)]
    index = draw(st.integers(0, len(declarations) - 1))
    chosen = declarations[index]
    kind = draw(st.sampled_from(["missing", "twice", "dead", "unknown", "both", "neither", "undecorated", "failing"]))
    if kind == "missing":
        return model, declarations[:index] + declarations[index + 1 :]
    if kind == "twice":
        return model, [*declarations, copy.copy(chosen)]
    if kind == "dead":
        return model, [*declarations, MethodDeclaration(match="*.nowhere", inner_wrapper=returning)]
    methods = {
        "unknown": {"inner_wrapper": "no_such_wrapper"},
        "both": {"inner_wrapper": returning, "local_compute_fn": local_compute},
        "neither": {},
        "undecorated": {"inner_wrapper": local_compute},
        "failing": {"inner_wrapper": failing},
    }
    broken = MethodDeclaration(match=chosen.match, inner_target=chosen.inner_target, **methods[kind])
    return model, [*declarations[:index], broken, *declarations[index + 1 :]]


def snapshot(model: torch.nn.Module) -> list[tuple[str, int, list[tuple[str, int]]]]:
    return [
        (name, id(module), sorted((key, id(value)) for key, value in vars(module).items()))
        for name, module in model.named_modules()
    ]


# --- in one process -----------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(declared_models())
def test_a_valid_declaration_plans_each_attention_once(
    example: tuple[torch.nn.Module, list[MethodDeclaration]],
) -> None:
    model, declarations = example
    before = snapshot(model)
    check = check_declarations(model, declarations, cp_size=2)
    attentions = find_attention_boundaries(model)
    if attentions:
        assert check.faults == ()
        assert [plan.fqn for plan in check.plans] == list(attentions)
    else:
        assert [fault.message.split(" in ")[0] for fault in check.faults] == ["no attention was found"]
    assert snapshot(model) == before


@settings(max_examples=300, deadline=None)
@given(wrong_models())
def test_an_invalid_declaration_has_a_fault_and_a_suggestion_that_works(
    example: tuple[torch.nn.Module, list[MethodDeclaration]],
) -> None:
    model, declarations = example
    if any(d.inner_wrapper is failing for d in declarations):
        return  # its fault shows when it is called
    register_inner_wrapper("serves_anything", in_place)
    before = snapshot(model)
    assert check_declarations(model, declarations, cp_size=2).faults
    suggested = suggest_declarations(model, declarations, cp_size=2)
    attentions = find_attention_boundaries(model)
    assert (suggested is not None) == bool(attentions)
    if suggested is not None:
        check = check_declarations(model, suggested.declarations, cp_size=2)
        assert check.faults == ()
        assert [plan.fqn for plan in check.plans] == list(attentions)
    assert snapshot(model) == before


# --- on ranks -----------------------------------------------------------------------------------------------------


def apply_valid_ones() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    wrapped = 0

    @ON_RANKS
    @given(declared_models())
    def applied_and_removed(example: tuple[torch.nn.Module, list[MethodDeclaration]]) -> None:
        nonlocal wrapped
        model, declarations = example
        attentions = find_attention_boundaries(model)
        if not attentions:
            return
        before = snapshot(model)
        applied = apply_context_parallel(model, mesh, declarations)
        rows = [(row.fqn, row.wrapper, row.match) for row in applied.report]
        assert gather_objects(rows, mesh=mesh) == [rows] * dist.get_world_size()
        assert [fqn for fqn, _, _ in rows] == list(attentions)
        for module in attentions.values():
            assert "forward" in vars(module)
            assert module(torch.ones(1)).item() == 1
        applied.remove()
        assert snapshot(model) == before
        wrapped += len(rows)

    applied_and_removed()
    return wrapped


def test_the_plan_is_the_same_on_all_ranks_and_is_taken_off_again(worlds: Any) -> None:
    first, second = worlds(2).run(apply_valid_ones)
    assert first == second >= 60


def apply_wrong_ones() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    messages: list[str] = []

    @ON_RANKS
    @given(declared_models(), wrong_models(), st.sampled_from(["all", "rank 1"]))
    def refused(
        valid: tuple[torch.nn.Module, list[MethodDeclaration]],
        wrong: tuple[torch.nn.Module, list[MethodDeclaration]],
        which: str,
    ) -> None:
        if not find_attention_boundaries(valid[0]):
            return
        model, declarations = wrong if which == "all" or mesh.get_local_rank() == 1 else valid
        before = snapshot(model)
        with pytest.raises(ValueError) as caught:
            apply_context_parallel(model, mesh, declarations)
        assert snapshot(model) == before
        messages.append(str(caught.value))
        assert str(caught.value).startswith("rank 1: ") or which == "all" or "all ranks must declare" in messages[-1]

    refused()
    return messages


def test_an_invalid_declaration_stops_all_ranks_and_changes_nothing(worlds: Any) -> None:
    first, second = worlds(2).run(apply_wrong_ones)
    assert first == second
    assert len(first) >= 30
    assert any("rank 1: " in message for message in first)
