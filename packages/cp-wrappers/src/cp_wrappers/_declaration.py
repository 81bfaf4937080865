"""From declarations to a plan: which wrapper each attention gets, or every fault at once.

Nothing here changes the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_core import ContextParallelError, ContextParallelStrategy, InvalidInputError, UnsupportedError

from ._boundaries import attention_shape, find_attention_boundaries, unserved_token_mixers
from ._boundary import boundary_of
from ._registry import ResolvedWrapper, WrapperDeclaration, resolve_inner_wrapper

_NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodDeclaration:
    """One declaration: a pattern of module names and the wrapper of the attentions it reaches."""

    # fnmatch on the full module name; `*` crosses dots.
    match: str
    inner_wrapper: WrapperDeclaration
    # The attention, relative to the matched module; "self" is that module. None: the only attention in it.
    inner_target: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryPlan:
    """What one attention will get."""

    fqn: str
    module: torch.nn.Module
    # The pattern that declared it.
    match: str
    wrapper: ResolvedWrapper
    # None for a wrapper with communication of its own.
    strategy: ContextParallelStrategy | None


def plan_boundaries(
    model: torch.nn.Module, declarations: Sequence[MethodDeclaration], *, cp_mesh: DeviceMesh | None
) -> list[BoundaryPlan]:
    """Find the declared wrapper of each attention of a model and check that it can serve it.

    Args:
        model: The model, not yet wrapped.
        declarations: What the user declared, in order.
        cp_mesh: 1-D mesh, for the checks of each strategy.

    Returns:
        One plan per attention, in the model's order.

    Raises:
        InvalidInputError: With all faults together: a pattern that reaches nothing, an attention without a method or
            with two, an unknown wrapper, heads or settings that the method cannot serve.
        UnsupportedError: If each of the faults is legal, and not supported.
    """
    boundaries = find_attention_boundaries(model)
    faults = _Faults()
    wrappers: list[ResolvedWrapper | None] = []
    for declaration in declarations:
        wrappers.append(None)
        with faults.noted():
            wrappers[-1] = resolve_inner_wrapper(declaration.inner_wrapper)
    reached = [_reached(declaration, model, boundaries) for declaration in declarations]
    faults.messages += _matching_faults(model, boundaries, declarations, reached)
    faults.messages += [
        f"{fqn} is wrapped already; call remove() on the earlier handle first."
        for fqn, module in boundaries.items()
        if boundary_of(module) is not None
    ]
    faults.unsupported += [
        f"{fqn} ({type(module).__name__}) mixes tokens along the sequence and no context-parallel method serves it: on "
        "each rank it would start from nothing. Train this model at cp_size 1."
        for fqn, module in unserved_token_mixers(model, boundaries).items()
    ]
    plans = []
    for fqn, module in boundaries.items():
        index = next((i for i, names in enumerate(reached) if fqn in names), None)
        wrapper = None if index is None else wrappers[index]
        if index is not None and wrapper is not None:
            with faults.noted():
                plans.append(_checked_plan(fqn, module, declarations[index].match, wrapper, cp_mesh))
    faults.raise_if_any()
    return plans


def _checked_plan(
    fqn: str, module: torch.nn.Module, match: str, wrapper: ResolvedWrapper, cp_mesh: DeviceMesh | None
) -> BoundaryPlan:
    strategy = wrapper.strategy()
    if wrapper.contract.check is not None:
        wrapper.contract.check(module, fqn)
    if strategy is not None:
        strategy.validate(cp_mesh, attention_shape(module, fqn))
    return BoundaryPlan(fqn=fqn, module=module, match=match, wrapper=wrapper, strategy=strategy)


def _reached(
    declaration: MethodDeclaration, model: torch.nn.Module, boundaries: dict[str, torch.nn.Module]
) -> set[str]:
    """Return the names of the attentions that a declaration reaches."""
    matched = [name for name, _ in model.named_modules() if fnmatchcase(name, declaration.match)]
    if declaration.inner_target is None:
        return {name for match in matched if (name := _only_attention_in(match, boundaries)) is not None}
    suffix = "" if declaration.inner_target == "self" else f".{declaration.inner_target}"
    return {f"{match}{suffix}" for match in matched}.intersection(boundaries)


def _only_attention_in(match: str, boundaries: dict[str, torch.nn.Module]) -> str | None:
    if match in boundaries:
        return match
    inside = [name for name in boundaries if name.startswith(f"{match}.")]
    return inside[0] if len(inside) == 1 else None


def _matching_faults(
    model: torch.nn.Module,
    boundaries: dict[str, torch.nn.Module],
    declarations: Sequence[MethodDeclaration],
    reached: Sequence[set[str]],
) -> list[str]:
    if not boundaries:
        return [f"no attention was found in {type(model).__name__}; describe its family with register_cp_model_spec."]
    faults = [
        f"the pattern {declaration.match!r} (inner_target {declaration.inner_target or 'left out'}) reaches no "
        f"attention; the model's attentions are {_listed(list(boundaries))}."
        for declaration, names in zip(declarations, reached, strict=True)
        if not names
    ]
    for fqn in boundaries:
        matches = [d.match for d, names in zip(declarations, reached, strict=True) if fqn in names]
        if len(matches) > 1:
            faults.append(f"{fqn} is declared {len(matches)} times, by {', '.join(matches)}; keep exactly one.")
    uncovered = [fqn for fqn in boundaries if not any(fqn in names for names in reached)]
    if uncovered:
        faults.append(
            f"{len(uncovered)} of {len(boundaries)} attentions have no context-parallel method: {_listed(uncovered)}. "
            "Declare one for each, for example:\n"
            + _suggestion(uncovered, all_of_them=len(uncovered) == len(boundaries))
        )
    return faults


def _suggestion(uncovered: Sequence[str], *, all_of_them: bool) -> str:
    """Return entries of plan_overrides that reach these attentions and no other."""
    last_names = {fqn.rpartition(".")[2] for fqn in uncovered}
    patterns = [f"*.{name}" for name in sorted(last_names)] if all_of_them else list(uncovered)
    return "\n".join(
        f'  - {{match: "{pattern}", when: cp, region_dispatch: false, inner_target: self, inner_wrapper: sdpa_hf}}'
        for pattern in patterns
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


@dataclass(slots=True)
class _Faults:
    """Collects what checks refuse, so that a user sees all faults at once."""

    messages: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    @contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except UnsupportedError as fault:
            self.unsupported.append(str(fault))
        except ContextParallelError as fault:
            self.messages.append(str(fault))

    def raise_if_any(self) -> None:
        found = list(dict.fromkeys([*self.messages, *self.unsupported]))
        if found:
            raise (InvalidInputError if self.messages else UnsupportedError)("\n".join(found))
