"""Declarations that fit a model, for the end of an error message: what the user declared, with what it lacks.

A suggestion is a text that the user may paste; nothing is ever applied from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from cp_core import ContextParallelError

from ._boundaries import find_attentions
from ._check import check_declarations
from ._declaration import MethodDeclaration
from ._faults import Faults
from ._methods import Place, check_method, judge_methods
from ._names import ModuleNames, are_related, is_inside
from ._reach import Target, is_mere_part, reached_targets
from ._registry import plain


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """Where a method would run."""

    cp_size: int
    place: Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Declarations that give every attention of a model one method that can serve it."""

    declarations: tuple[MethodDeclaration, ...]
    # Names of wrappers that stand in it though the user declared no such method.
    filled_in: tuple[str, ...]

    @property
    def heading(self) -> str:
        """What it is, in a sentence."""
        if not self.filled_in:
            return "Declarations that fit this model"
        return (
            f"Declarations that fit this model ({', '.join(self.filled_in)} stands where no usable method was "
            "declared; choose yours)"
        )


def suggest_declarations(
    model: torch.nn.Module,
    declarations: Sequence[MethodDeclaration],
    *,
    cp_size: int,
    device: torch.device | None = None,
    tp_degrees: Mapping[str, int] | None = None,
) -> Suggestion | None:
    """Return declarations that give every attention exactly one method that can serve it.

    Each attention keeps the method that the user declared for it; of several the most specific. One without a method
    gets one that the user declared elsewhere, else the first registered one that can serve it.

    Args:
        model: The model.
        declarations: What the user declared, faults and all.
        cp_size: Ranks that share a sequence.
        device: Where the model will run.
        tp_degrees: As for `check_declarations`.

    Returns:
        Declarations without a fault, checked; None where no registered method serves some attention.
    """
    setting = _Setting(cp_size=cp_size, place=Place(device=device, tp_degrees=tp_degrees or {}))
    try:
        suggested = tuple(_suggested(model, declarations, setting))
    except (ContextParallelError, LookupError):  # no spec's target, or an attention that nothing serves
        return None
    if check_declarations(model, suggested, cp_size=cp_size, device=device, tp_degrees=tp_degrees).faults:
        return None
    declared = [_method_of(declaration) for declaration in declarations]
    filled_in = dict.fromkeys(str(d.inner_wrapper) for d in suggested if _method_of(d) not in declared)
    return Suggestion(declarations=suggested, filled_in=tuple(filled_in))


def _suggested(
    model: torch.nn.Module, declarations: Sequence[MethodDeclaration], setting: _Setting
) -> Iterator[MethodDeclaration]:
    names = ModuleNames.of(model)
    attentions = find_attentions(names)
    usable = [d for d in declarations if (d.inner_wrapper is None) != (d.local_compute_fn is None)]
    found = {id(d): Faults() for d in usable}
    targets = [t for d in usable for t in reached_targets(d, names, attentions, found[id(d)])]
    targets = [t for t in targets if not is_mere_part(t, attentions, names, Faults())]
    targets = [t for t in targets if not _is_wide(t, attentions) and _serves(t, names, setting)]
    chosen = _chosen_targets(targets, attentions)
    intact = [d for d in usable if not found[id(d)].all() and _all_of(d, targets) == _all_of(d, chosen) != []]
    kept = [target for target in chosen if any(target.declaration is declaration for declaration in intact)]
    missing = [fqn for fqn in attentions if not any(are_related(target.fqn, fqn) for target in chosen)]
    rest = {target.fqn: target.declaration for target in chosen if target not in kept}
    rest |= _methods_for(missing, usable, attentions, setting)
    methods = [_method_of(declaration) for declaration in (*intact, *rest.values())]
    if rest and all(method == methods[0] for method in methods):  # one method for all: one pattern for all
        rest = {target.fqn: target.declaration for target in kept} | rest
        intact = []
    yield from (replace(declaration, source="") for declaration in intact)
    yield from _rewritten({fqn: rest[fqn] for fqn in names.modules if fqn in rest}, names)


def _is_wide(target: Target, attentions: Mapping[str, torch.nn.Module]) -> bool:
    return sum(is_inside(fqn, target.fqn) for fqn in attentions) > 1


def _serves(target: Target, names: ModuleNames, setting: _Setting) -> bool:
    try:
        wrapper = target.declaration.resolve()
        module = names.modules[target.fqn]
        check_method(wrapper, module, target.fqn, cp_size=setting.cp_size, place=setting.place)
    except ContextParallelError:
        return False
    return True


def _chosen_targets(targets: Sequence[Target], attentions: Mapping[str, torch.nn.Module]) -> list[Target]:
    """Of the targets that stand for one attention, keep the one whose declaration reaches the fewest modules."""
    chosen = {target: None for target in targets if not any(are_related(target.fqn, fqn) for fqn in attentions)}
    for fqn in attentions:
        claims = [target for target in targets if are_related(target.fqn, fqn)]
        if claims:
            chosen[min(claims, key=lambda target: len(_all_of(target.declaration, targets)))] = None
    return list(chosen)


def _methods_for(
    missing: Sequence[str],
    usable: Sequence[MethodDeclaration],
    attentions: Mapping[str, torch.nn.Module],
    setting: _Setting,
) -> dict[str, MethodDeclaration]:
    """Return a method for each attention that has none; LookupError where nothing serves one."""
    if not missing:
        return {}
    place = setting.place
    verdicts = judge_methods(
        {fqn: attentions[fqn] for fqn in missing},
        cp_size=setting.cp_size,
        device=place.device,
        tp_degrees=place.tp_degrees,
    )
    methods = {}
    for fqn in missing:
        candidates = [d for d in usable if _would_serve(d, attentions[fqn], fqn, setting)]
        legal = [verdict.wrapper for verdict in verdicts[fqn] if verdict.reason is None]
        if not candidates and not legal:
            raise LookupError(fqn)
        methods[fqn] = candidates[0] if candidates else MethodDeclaration(match=fqn, inner_wrapper=legal[0])
    return methods


def _would_serve(declaration: MethodDeclaration, module: torch.nn.Module, fqn: str, setting: _Setting) -> bool:
    """Only wrappers that state what they can serve can be carried over to another attention."""
    try:
        wrapper = declaration.resolve()
        checked = check_method(wrapper, module, fqn, cp_size=setting.cp_size, place=setting.place)
    except ContextParallelError:
        return False
    return checked.strategy is not None


def _rewritten(methods: Mapping[str, MethodDeclaration], names: ModuleNames) -> Iterator[MethodDeclaration]:
    """Yield declarations that reach these modules and no others, as few as patterns allow."""
    by_method = groupby(
        sorted(methods.items(), key=lambda item: repr(_method_of(item[1]))), key=lambda item: repr(_method_of(item[1]))
    )
    for _, group in by_method:
        members = list(group)
        declaration = members[0][1]
        for pattern in _patterns([fqn for fqn, _ in members], names):
            yield replace(declaration, match=pattern, inner_target="self", source="")


def _patterns(fqns: Sequence[str], names: ModuleNames) -> Iterator[str]:
    last_names = dict.fromkeys(fqn.rpartition(".")[2] for fqn in fqns)
    for last in last_names:
        members = [fqn for fqn in fqns if fqn.rpartition(".")[2] == last]
        shared = f"*.{_escaped(last)}"
        if set(names.matching(shared)) == set(members):
            yield shared
        else:
            yield from map(_escaped, members)


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _method_of(declaration: MethodDeclaration) -> tuple[object, object]:
    return plain(declaration.inner_wrapper), plain(declaration.local_compute_fn)


def _all_of(declaration: MethodDeclaration, targets: Sequence[Target]) -> list[Target]:
    return [target for target in targets if target.declaration is declaration]
