"""Which modules a declaration reaches, and which attentions these stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ._declaration import MethodDeclaration
from ._faults import Faults, listed, named
from ._names import ModuleNames, are_related, is_inside, joined


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Target:
    """A module that a declaration reaches."""

    fqn: str
    declaration: MethodDeclaration


def reached_targets(
    declaration: MethodDeclaration, names: ModuleNames, attentions: Mapping[str, torch.nn.Module], faults: Faults
) -> list[Target]:
    """Return the modules that a declaration reaches; why it reaches none is noted.

    Args:
        declaration: Its `match` and `inner_target` are read.
        names: The model's modules.
        attentions: Those of them that are attentions.
        faults: Collects what is wrong.
    """
    matched = names.matching(declaration.match)
    there = (
        f"the model's attentions are {listed(attentions)}." if attentions else "no attention was found in the model."
    )
    if not matched:
        faults.add(f"{declaration.label} matches no module; {there}")
        return []
    if declaration.inner_target is None:
        reached = _unnamed_targets(declaration, matched, attentions, faults)
    else:
        reached = _named_targets(declaration.inner_target, matched, names, attentions)
    if not reached:
        what = f"has an inner_target {declaration.inner_target!r}" if declaration.inner_target else "is an attention"
        faults.add(f"{declaration.label} matches {listed(matched)}, but none of these {what}; {there}")
    return [Target(fqn=fqn, declaration=declaration) for fqn in reached]


def _named_targets(
    inner_target: str, matched: Sequence[str], names: ModuleNames, attentions: Mapping[str, torch.nn.Module]
) -> list[str]:
    """A target that the user names is taken at its word, whether it looks like an attention or not."""
    if inner_target != "self":
        inner = (names.named(joined(match, inner_target)) for match in matched)
        return [name for name in dict.fromkeys(inner) if name is not None]
    # `*` alone matches every module there is; what is meant are the attentions among them.
    marked = [name for name in matched if name in attentions]
    nested = any(is_inside(name, outer) for name in matched for outer in matched if name != outer)
    return marked if marked or nested else list(matched)


def _unnamed_targets(
    declaration: MethodDeclaration,
    matched: Sequence[str],
    attentions: Mapping[str, torch.nn.Module],
    faults: Faults,
) -> list[str]:
    """Where the target is left out it is the match, or the only attention in it."""
    reached: dict[str, None] = {}
    several: dict[str, list[str]] = {}
    for match in matched:
        inside = [name for name in attentions if is_inside(name, match)]
        if match in attentions or len(inside) == 1:
            reached[match if match in attentions else inside[0]] = None
        elif inside:
            several[match] = inside
    for match, inside in several.items():
        if not reached.keys() >= set(inside):
            faults.add(
                f"{declaration.label} leaves out inner_target, but {match or 'the model'} holds {len(inside)} "
                f"attentions ({listed(inside)}); match each of them, or name one as inner_target."
            )
            return list(dict.fromkeys([*reached, *inside]))  # so that they are not said to be undeclared as well
    return list(reached)


def assign(
    names: ModuleNames, attentions: Mapping[str, torch.nn.Module], targets: Sequence[Target], faults: Faults
) -> tuple[dict[str, Target], list[str]]:
    """Give each boundary its one target; two methods on one boundary are noted.

    Args:
        names: The model's modules.
        attentions: The model's attentions.
        targets: What all declarations reach.
        faults: Collects what is wrong.

    Returns:
        The target of each boundary by the boundary's name, and the attentions that no target stands for.
    """
    assigned: dict[str, Target] = {}
    undeclared = []
    targets = [target for target in targets if not is_mere_part(target, attentions, names, faults)]
    claimed: set[Target] = set()
    for fqn in attentions:
        claims = [t for t in targets if are_related(t.fqn, fqn)]
        claimed.update(claims)
        if not claims:
            undeclared.append(fqn)
        elif len(claims) == 1:
            assigned[claims[0].fqn] = claims[0]
        else:
            message = f"{named(fqn)} is declared {len(claims)} times, by {_labels(fqn, claims)}; keep exactly one."
            faults.add(message, module=fqn)
    _refuse_wide_targets(attentions, targets, faults)
    _assign_unmarked([target for target in targets if target not in claimed], assigned, faults)
    return assigned, undeclared


def is_mere_part(target: Target, attentions: Mapping[str, torch.nn.Module], names: ModuleNames, faults: Faults) -> bool:
    """Whether a target is a part of an attention that cannot stand for it: a projection, a norm.

    In hand-written attentions an inner module may attend; in those of transformers, and among torch's own, none does.
    """
    outer = next((fqn for fqn in attentions if is_inside(target.fqn, fqn) and fqn != target.fqn), None)
    if outer is None:
        return False
    of_torch = type(names.modules[target.fqn]).__module__.startswith("torch.nn.modules")
    of_transformers = hasattr(getattr(attentions[outer], "config", None), "_attn_implementation")
    if of_torch or of_transformers:
        faults.add(
            f"{target.declaration.label} reaches {target.fqn}, a part of the attention {outer}, which a method on it "
            "does not serve; match the attention.",
            module=outer,
        )
    return of_torch or of_transformers


def _refuse_wide_targets(attentions: Mapping[str, torch.nn.Module], targets: Sequence[Target], faults: Faults) -> None:
    for target in targets:
        held = [fqn for fqn in attentions if is_inside(fqn, target.fqn)]
        if len(held) > 1:
            faults.add(
                f"{target.declaration.label} reaches {named(target.fqn)}, which holds {len(held)} "
                f"attentions ({listed(held)}); each attention has a method of its own, so match the attentions."
            )


def _assign_unmarked(targets: Sequence[Target], assigned: dict[str, Target], faults: Faults) -> None:
    """Targets that the user named and that carry no mark of an attention are boundaries of their own."""
    names = dict.fromkeys(target.fqn for target in targets)
    for fqn in names:
        if any(is_inside(fqn, outer) for outer in names if outer != fqn):
            continue
        claims = [target for target in targets if is_inside(target.fqn, fqn)]
        if len(claims) == 1:
            assigned[fqn] = claims[0]
        else:
            message = f"{named(fqn)} is declared {len(claims)} times, by {_labels(fqn, claims)}; keep exactly one."
            faults.add(message, module=fqn)


def _labels(fqn: str, targets: Sequence[Target]) -> str:
    return ", ".join(
        target.declaration.label if target.fqn == fqn else f"{target.declaration.label} at {named(target.fqn)}"
        for target in targets
    )
