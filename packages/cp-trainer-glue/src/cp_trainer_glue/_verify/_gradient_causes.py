"""Why gradients disagree where the forward agrees."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ._batches import IGNORED, GlobalBatch
from ._case import Case
from ._cause import Cause
from ._check import distance, some
from ._weighting import Part, Weighting, gradient_of, known_factor, parts_of, weightings

_MAX_PROBES, _MAX_ENTRIES = 8, 2**24
_AXES = {"dp": "data parallel (dp)", "cp": "context parallel (cp)", "tp": "tensor parallel (tp)"}


def gradient_causes(case: Case) -> Iterator[Cause]:
    """Yield why gradients disagree; the first one that the numbers bear out."""
    failed = [check.name for check in case.failed("gradient") if math.isfinite(check.error)]
    one_sided = [check for check in case.failed("gradient") if not math.isfinite(check.error)]
    if one_sided:
        yield _one_sided(case, one_sided[0].name, one_sided[0].detail)
    if case.declared.gradients.differing:
        yield _replica_cause(case, case.declared.gradients.differing)
        failed = [name for name in failed if name not in case.declared.gradients.differing]
    if not failed:
        return
    cause = _scaled(case, failed) or _weighted(case, failed)
    if cause is not None:
        yield cause


def _one_sided(case: Case, name: str, detail: str) -> Cause:
    digests = [rank.get(name) for rank in case.declared.parameters.digests]
    unlike = "its values differ between ranks" if len(set(digests)) > 1 else "its values are the same on all ranks"
    lacking = name in case.gathered.scalars[0].not_optimized
    sentence = f"{name} {detail}"
    if "None" in detail:
        sentence += "; its gradient is lost, or it is used by the wrapped model only"
    else:
        sentence += ": it was added to or taken from the model after it was built, where nothing synchronises it"
    evidence = f"after the step {unlike}; it is {'not ' if lacking else ''}in the optimizer"
    return Cause(kind="one_sided_parameter", sentence=f"{sentence}.", evidence=f"{evidence}.")


def given_labels_explain(case: Case) -> float | None:
    """Return how near one device comes with the labels that the loss was given, None if that is not all."""
    failed = [check.name for check in case.failed("gradient") if math.isfinite(check.error)]
    if not failed:
        return None
    probes = _probes(case, failed)
    parts = parts_of(case.gathered, case.reference, probes, labels_of=case.labels_as_given)
    found = {name: value for name in probes if (value := case.declared.gradients.values[name]) is not None}
    return _fit_over_all_tokens(case, parts, found)


def _fit_over_all_tokens(case: Case, parts: Sequence[Part], found: Mapping[str, torch.Tensor]) -> float | None:
    for denominator in (case.expected.denominator, sum(part.weight for part in parts) or 1.0):
        weights = [1 / denominator] * len(parts)
        rest = _misfit(found, {name: gradient_of(parts, weights, name) for name in found})
        if rest <= case.tolerances.match:
            return rest
    return None


# --- one factor ---------------------------------------------------------------------------------------------------


def _scaled(case: Case, failed: Sequence[str]) -> Cause | None:
    pairs = [(case.declared.gradients.values[name], case.expected.gradients[name]) for name in failed]
    found = torch.cat([f.double().flatten() for f, _ in pairs if f is not None])
    expected = torch.cat([e.double().flatten() for _, e in pairs if e is not None])
    norm = float(expected.norm())
    if not norm or not bool(found.isfinite().all()):
        return None
    ratio = float(found @ expected) / norm**2
    rest = float((found - ratio * expected).norm()) / norm
    if not ratio or rest > case.tolerances.match * abs(ratio):
        return None
    source = known_factor(ratio, case.sizes, case.tolerances.match)
    every = len(failed) == sum(g is not None and float(g.norm()) > 0 for g in case.expected.gradients.values())
    which = "all gradients are" if every else f"the gradients of {len(failed)} parameters ({some(failed)}) are"
    factor = f"{ratio:.10g}" + (f" = {source}" if source else "")
    return Cause(
        kind="gradient_scaled",
        sentence=f"{which} multiplied by {factor}: the loss or the gradient is scaled once too often, or not enough.",
        evidence=f"with that factor {len(failed)} gradients equal one device's to {rest / abs(ratio):.1e}.",
    )


# --- other weights ------------------------------------------------------------------------------------------------


def _weighted(case: Case, failed: Sequence[str]) -> Cause | None:
    probes = _probes(case, failed)
    parts = parts_of(case.gathered, case.reference, probes, labels_of=case.labels_as_given)
    found = {name: value for name in probes if (value := case.declared.gradients.values[name]) is not None}
    for weighting in weightings(parts, case.sizes):
        for names in _compared_together(weighting, found):
            own = {name: found[name] for name in names}
            rest = _misfit(own, {name: gradient_of(parts, weighting.weights, name) for name in names})
            if rest <= case.tolerances.match:
                return Cause(
                    kind=weighting.kind,
                    sentence=f"{_subject(case, failed)} {weighting.sentence}.",
                    evidence=f"put together like that from one device's parts, {some(names)} equal to {rest:.1e}.",
                )
    return _lost_ends(case, found, probes)


def _compared_together(weighting: Weighting, found: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield the parameters that must fit: all, and where parts are lacking each by itself.

    What a rank's tokens add is what its labels add only behind the last attention: before it, the labels of other
    ranks reach its keys and values.
    """
    yield list(found)
    if weighting.lacks_parts:
        yield from ([name] for name in found)


def _subject(case: Case, failed: Sequence[str]) -> str:
    if len(failed) == sum(g is not None for g in case.expected.gradients.values()):
        return "each gradient is"
    return f"the gradient of {some(failed)} is"


def _probes(case: Case, failed: Sequence[str]) -> list[str]:
    """Return some of the parameters, the small ones and the last, of a size that can be kept once per part."""
    sizes = {name: case.expected.parameters[name].numel() for name in failed}
    small = sorted(failed, key=lambda name: (sizes[name], name))
    in_turn = [name for pair in zip(small, reversed(failed), strict=True) for name in pair]
    chosen: list[str] = []
    entries = 0
    for name in dict.fromkeys(in_turn):
        if len(chosen) == _MAX_PROBES:
            break
        if not chosen or entries + sizes[name] <= _MAX_ENTRIES:
            chosen.append(name)
            entries += sizes[name]
    return chosen


def _lost_ends(case: Case, found: Mapping[str, torch.Tensor], probes: Sequence[str]) -> Cause | None:
    """Try labels that were shifted on each shard, inside of what the loss was given."""

    def without_ends(batch: GlobalBatch) -> torch.Tensor:
        labels = case.labels_as_given(batch).clone()
        labels[:, sorted(case.shard_ends(batch))] = IGNORED
        return labels

    if not any(case.shard_ends(batch) for batch in case.gathered.batches):
        return None
    parts = parts_of(case.gathered, case.reference, probes, labels_of=without_ends)
    rest = _fit_over_all_tokens(case, parts, found)
    if rest is None:
        return None
    ends = sorted(case.shard_ends(case.gathered.batches[0]))
    return Cause(
        kind="labels_shifted_per_rank",
        sentence="labels are shifted on each rank's shard, so the last token of every shard has no target.",
        evidence=f"without the targets of positions {some(list(map(str, ends)))} one device's gradients equal the "
        f"declared run's to {rest:.1e}.",
    )


def _misfit(found: Mapping[str, torch.Tensor], predicted: Mapping[str, torch.Tensor]) -> float:
    size = math.sqrt(sum(float(value.double().norm()) ** 2 for value in found.values()))
    rest = math.sqrt(sum(float((found[name].double() - predicted[name]).norm()) ** 2 for name in found))
    return rest / size if size else math.inf


# --- replicas -----------------------------------------------------------------------------------------------------


def _replica_cause(case: Case, differing: Sequence[str]) -> Cause:
    axes = _axes_of(case, differing)
    along = " and ".join(_AXES[axis] for axis in axes) or "ranks"
    names = f"{len(differing)} parameter{'s' if len(differing) > 1 else ''} ({some(differing)})"
    sentence = f"the gradients of {names} differ between ranks along {along}"
    name, rest, ratio = _sum_over(case, axes, differing)
    if rest > case.tolerances.match:
        evidence = "summed over these ranks they are not one device's gradient either"
        return Cause(
            kind="replicas_differ", sentence=f"{sentence}: nothing synchronises them.", evidence=f"{evidence}."
        )
    if axes == ["tp"]:
        sentence += ": each rank has the part of its own heads, and the all-reduce over tensor parallel is missing."
    else:
        sentence += ": each rank has its own part, and they are not summed."
    factor = "" if abs(ratio - 1) <= case.tolerances.match else f"{ratio:.6g} times "
    return Cause(
        kind="missing_tp_all_reduce" if axes == ["tp"] else "gradients_not_synchronised",
        sentence=sentence,
        evidence=f"the sum over these ranks is {factor}one device's gradient of {name} to {rest:.1e}.",
    )


def _axes_of(case: Case, differing: Sequence[str]) -> list[str]:
    places, digests = case.gathered.coordinates, case.declared.gradients.digests
    axes = []
    for axis in _AXES:
        groups: dict[object, set[tuple[str | None, ...]]] = {}
        for place, found in zip(places, digests, strict=True):
            others = place._replace(**{axis: 0})
            groups.setdefault(others, set()).add(tuple(found.get(name) for name in differing))
        if any(len(kinds) > 1 for kinds in groups.values()):
            axes.append(axis)
    return axes


def _sum_over(case: Case, axes: Sequence[str], differing: Sequence[str]) -> tuple[str, float, float]:
    """Return a parameter, how far the sum over ranks is from a multiple of one device's gradient, and that multiple."""
    places = case.gathered.coordinates
    held = [r for r, place in enumerate(places) if all(getattr(place, a) == 0 for a in _AXES if a not in axes)]
    for name in differing:
        expected, values = case.expected.gradients.get(name), [case.replicas[rank].get(name) for rank in held]
        if expected is None or not float(expected.norm()) or any(value is None for value in values):
            continue
        total = torch.stack([value.double() for value in values if value is not None]).sum(0)
        ratio = float((total * expected).sum()) / float(expected.double().norm()) ** 2
        return name, distance(total, ratio * expected), ratio
    return "", math.inf, 1.0
