"""From declarations to a plan: which method each attention gets, or every fault at once. Nothing changes the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cp_core import InvalidInputError

from ._attention_settings import refuse_without_mask
from ._boundaries import find_attentions
from ._boundary import boundary_of
from ._declaration import BoundaryPlan, MethodDeclaration
from ._faults import Fault, Faults, listed, named, raise_faults
from ._methods import Place, check_method
from ._names import ModuleNames, are_related
from ._reach import Target, assign, reached_targets
from ._registry import ResolvedWrapper
from ._whole_sequence import whole_sequence_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclarationCheck:
    """What a model's declarations come to."""

    # One per boundary, in the model's order; some may be missing where there are faults.
    plans: tuple[BoundaryPlan, ...]
    faults: tuple[Fault, ...]


def plan_boundaries(
    model: torch.nn.Module,
    declarations: Sequence[MethodDeclaration],
    *,
    cp_size: int,
    device: torch.device | None = None,
) -> list[BoundaryPlan]:
    """Find the declared method of each attention of a model and check that it can serve it.

    Args:
        model: The model, not yet wrapped; it may be on the meta device.
        declarations: What the user declared, in order.
        cp_size: Ranks that share a sequence.
        device: Where the model will run; None is where its parameters are.

    Returns:
        One plan per attention, in the model's order.

    Raises:
        InvalidInputError: With all faults together: a pattern that reaches nothing, an attention without a method or
            with two, an unknown wrapper, heads or settings that the method cannot serve.
        UnsupportedError: If each of the faults is legal, and not supported.
    """
    check = check_declarations(model, declarations, cp_size=cp_size, device=device)
    raise_faults(check.faults)
    return list(check.plans)


def check_declarations(
    model: torch.nn.Module,
    declarations: Sequence[MethodDeclaration],
    *,
    cp_size: int,
    device: torch.device | None = None,
    tp_degrees: Mapping[str, int] | None = None,
) -> DeclarationCheck:
    """Do what `plan_boundaries` does, and return the faults instead of raising them.

    At cp size 1 nothing is sharded: an attention may have no method, and a method with a strategy, which would be an
    identity, is not planned.

    Args:
        model: As for `plan_boundaries`, before tensor parallelism.
        declarations: As there.
        cp_size: As there.
        device: As there.
        tp_degrees: Tensor-parallel ranks over which the heads of an attention will be split, by its name; absent is 1.
    """
    faults, place = Faults(), Place(device=device, tp_degrees=tp_degrees or {})
    # First, since a user's module may register a model spec when it is imported.
    wrappers = {id(declaration): _resolved(declaration, faults) for declaration in declarations}
    names = ModuleNames.of(model)
    try:
        attentions = find_attentions(names)
    except InvalidInputError as error:  # a spec is wrong, and whatever else were said would follow from it
        faults.add(str(error))
        return DeclarationCheck(plans=(), faults=faults.all())
    targets = [t for declaration in declarations for t in reached_targets(declaration, names, attentions, faults)]
    assigned, undeclared = assign(names, attentions, targets, faults)
    if cp_size > 1:
        _note_undeclared(model, attentions, undeclared, assigned, faults)
        _note_whole_sequence_parts(names, attentions, assigned, faults)
    _note_wrapped(names, attentions, assigned, faults)
    plans = []
    for fqn, module in names.modules.items():
        target = assigned.get(fqn)
        wrapper = None if target is None else wrappers[id(target.declaration)]
        if target is not None and wrapper is not None and (cp_size > 1 or wrapper.contract.strategy is None):
            with faults.noted(fqn):
                plans.append(_planned(target, module, attentions, wrapper, cp_size=cp_size, place=place))
    return DeclarationCheck(plans=tuple(plans), faults=faults.all())


def check_methods(declarations: Sequence[MethodDeclaration]) -> tuple[Fault, ...]:
    """Return the faults of declarations that show without a model: unknown methods, wrong data, both channels or none.

    Args:
        declarations: What the user declared, in order.
    """
    faults = Faults()
    for declaration in declarations:
        _resolved(declaration, faults)
    return faults.all()


def _resolved(declaration: MethodDeclaration, faults: Faults) -> ResolvedWrapper | None:
    if declaration.inner_wrapper is not None and declaration.local_compute_fn is not None:
        faults.add(f"{declaration.label} declares both inner_wrapper and local_compute_fn; keep one of them.")
        return None
    if declaration.inner_wrapper is None and declaration.local_compute_fn is None:
        faults.add(f"{declaration.label} names no method; add inner_wrapper, for example inner_wrapper: sdpa_hf.")
        return None
    try:
        return declaration.resolve()
    except InvalidInputError as error:
        faults.add(f"{declaration.label}: {error}")
        return None


def _note_undeclared(
    model: torch.nn.Module,
    attentions: Mapping[str, torch.nn.Module],
    undeclared: Sequence[str],
    assigned: Mapping[str, Target],
    faults: Faults,
) -> None:
    if not attentions and not assigned:
        faults.add(
            f"no attention was found in {type(model).__name__}; describe its family with register_cp_model_spec, or "
            "name the module that attends as inner_target."
        )
    if undeclared:
        faults.add(
            f"{len(undeclared)} of {len(attentions)} attentions have no context-parallel method: {listed(undeclared)}; "
            "declare one for each."
        )


def _note_wrapped(
    names: ModuleNames, attentions: Mapping[str, torch.nn.Module], assigned: Mapping[str, Target], faults: Faults
) -> None:
    for fqn in dict.fromkeys((*attentions, *assigned)):
        if boundary_of(names.modules[fqn]) is not None:
            faults.add(f"{named(fqn)} is wrapped already; call remove() on the earlier handle first.", module=fqn)


def _note_whole_sequence_parts(
    names: ModuleNames, attentions: Mapping[str, torch.nn.Module], assigned: Mapping[str, Target], faults: Faults
) -> None:
    served = {**attentions, **{fqn: names.modules[fqn] for fqn in assigned}}
    for fqn, reason in whole_sequence_parts(names, attentions, served):
        faults.add(
            f"{named(fqn)} ({type(names.modules[fqn]).__name__}) {reason}. Train this model at cp_size 1.",
            module=fqn,
            unsupported=True,
        )


def _planned(
    target: Target,
    module: torch.nn.Module,
    attentions: Mapping[str, torch.nn.Module],
    wrapper: ResolvedWrapper,
    *,
    cp_size: int,
    place: Place,
) -> BoundaryPlan:
    checked = check_method(wrapper, module, named(target.fqn), cp_size=cp_size, place=place)
    stands_for = {n: m for n, m in attentions.items() if are_related(n, target.fqn)}
    if checked.strategy is None and cp_size > 1:
        for fqn, attention in stands_for.items():
            _check_without_mask(attention, fqn)
    return BoundaryPlan(
        fqn=target.fqn,
        module=module,
        declaration=target.declaration,
        wrapper=wrapper,
        strategy=checked.strategy,
        shape=checked.shape,
        attentions=tuple(stands_for.values()),
    )


def _check_without_mask(attention: torch.nn.Module, fqn: str) -> None:
    """Under a method of the user's own, attention of transformers runs as before, but without its mask."""
    if hasattr(getattr(attention, "config", None), "_attn_implementation"):
        refuse_without_mask(attention, fqn)
