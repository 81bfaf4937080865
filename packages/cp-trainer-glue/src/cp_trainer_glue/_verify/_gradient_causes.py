"""Why gradients, loss, norm or parameters disagree where the forward agrees."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ._batches import IGNORED, GlobalBatch
from ._case import Case
from ._cause import Cause
from ._check import distance, relative_error
from ._weighting import Part, Weighting, gradient_of, known_factor, loss_of, parts_of, weightings

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
    which = "all gradients are" if every else f"the gradients of {len(failed)} parameters ({_some(failed)}) are"
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
                    evidence=f"put together like that from one device's parts, {_some(names)} equal to {rest:.1e}.",
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
    return f"the gradient of {_some(failed)} is"


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
        evidence=f"without the targets of positions {_some(list(map(str, ends)))} one device's gradients equal the "
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
    names = f"{len(differing)} parameter{'s' if len(differing) > 1 else ''} ({_some(differing)})"
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


# --- numbers ------------------------------------------------------------------------------------------------------


def loss_causes(case: Case) -> Iterator[Cause]:
    """Yield why the count of tokens or the logged loss disagrees."""
    if case.failed("valid_tokens"):
        yield _token_count(case)
    if not case.failed("loss"):
        return
    found = [scalars.loss for scalars in case.gathered.scalars]
    limit = max(100 * case.tolerances.loss, 1e-9)
    ratio = found[0] / case.expected.loss if case.expected.loss else math.nan
    source = known_factor(ratio, case.sizes, limit)
    parts = parts_of(case.gathered, case.reference, [], labels_of=case.labels_as_given)
    fitting = [w for w in weightings(parts, case.sizes) if relative_error(found[0], loss_of(parts, w.weights)) <= limit]
    if source is not None:
        yield Cause(
            kind="loss_scaled",
            sentence=f"the logged loss is multiplied by {source}.",
            evidence=f"{found[0]:.10g} / {case.expected.loss:.10g} = {ratio:.10g}.",
        )
    elif fitting:
        yield _weighted_loss(case, parts, fitting[0])
    elif len(set(found)) > 1:
        yield Cause(
            kind="loss_not_joined",
            sentence="the logged loss differs between ranks: it is not summed over them.",
            evidence=f"ranks log {_some([f'{value:.6g}' for value in found])}; one device {case.expected.loss:.6g}.",
        )


def _weighted_loss(case: Case, parts: Sequence[Part], weighting: Weighting) -> Cause:
    return Cause(
        kind=weighting.kind,
        sentence=f"the logged loss is {weighting.sentence}.",
        evidence=f"put together like that, one device's parts give {loss_of(parts, weighting.weights):.10g}.",
    )


def _token_count(case: Case) -> Cause:
    found, expected = case.gathered.scalars[0].valid_tokens, case.expected.valid_tokens
    counts: dict[int, int] = {}
    for batch in case.gathered.batches:
        labels, owner = case.labels_as_given(batch), case.owner(batch)[: batch.shift_labels.shape[1]]
        for cp_rank in range(case.gathered.cp_size):
            counts[cp_rank] = counts.get(cp_rank, 0) + int((labels[:, owner == cp_rank] != IGNORED).sum())
    given = sum(counts.values())
    numbers = f"{found} tokens are counted, but {expected} have a label"
    if found == counts[0] and case.gathered.cp_size > 1:
        sentence = "valid tokens are counted over data parallel only: each context-parallel rank counts its own."
        return Cause(
            kind="tokens_over_dp_only",
            sentence=sentence,
            evidence=f"{numbers}; context-parallel rank 0 holds {counts[0]} of them.",
        )
    if found == given != expected:
        sentence = "valid tokens are counted on labels that are not one device's."
        return Cause(kind="tokens_of_other_labels", sentence=sentence, evidence=f"{numbers}.")
    source = known_factor(found / expected, case.sizes, 1e-12) if expected else None
    sentence = f"valid tokens are multiplied by {source}." if source else "valid tokens are counted wrongly."
    return Cause(kind="token_count", sentence=sentence, evidence=f"{numbers}.")


def norm_causes(case: Case) -> Iterator[Cause]:
    """Yield why the reported norm, or what clipping did, disagrees where gradients agree."""
    if case.failed("grad_norm"):
        yield _norm_cause(case)
    elif case.failed("clipped_gradient"):
        name = case.failed("clipped_gradient")[0].name
        yield Cause(
            kind="clipped_otherwise",
            sentence="gradients are clipped by another factor than max_grad_norm over the norm.",
            evidence=f"gradients and norm agree before clipping; after it {name} does not.",
        )


def _norm_cause(case: Case) -> Cause:
    scalars, expected, limit = case.gathered.scalars, case.expected.grad_norm, max(1e-9, 10 * case.tolerances.grad_norm)
    reported = [s.grad_norm for s in scalars]
    for moment, words in ((1, "of this rank's own shard of the gradients"), (0, "of gradients before they are joined")):
        own = [s.own_norms[moment] for s in scalars]
        if all(relative_error(a, b) <= limit for a, b in zip(reported, own, strict=True)):
            return Cause(
                kind="norm_per_shard" if moment else "norm_before_reduction",
                sentence=f"the norm that clips is that {words}: it must be taken over all ranks.",
                evidence=f"rank 0 reports {reported[0]:.10g}, which is the norm of what it holds; the whole is "
                f"{expected:.10g}.",
            )
    ratio = reported[0] / expected if expected else math.nan
    for power, words in ((1.0, "{}"), (2.0, "the square root of {}")):
        source = known_factor(ratio**power, case.sizes, limit)
        if source is not None:
            return Cause(
                kind="norm_scaled",
                sentence=f"the norm that clips is multiplied by {words.format(source)}.",
                evidence=f"{reported[0]:.10g} / {expected:.10g} = {ratio:.10g}.",
            )
    return Cause(
        kind="norm_wrong",
        sentence="the norm that clips is not the norm of the gradients, which agree.",
        evidence=f"{reported[0]:.10g} is reported, the gradients' norm is {expected:.10g}.",
    )


def optimizer_causes(case: Case) -> Iterator[Cause]:
    """Yield what the optimizer lacks, and what it has that is not the model's."""
    for check in case.failed("optimizer"):
        yield Cause(
            kind="not_in_optimizer" if "not in" in check.detail else "optimizer_of_other_parameters",
            sentence=f"{check.detail}.",
            evidence="found by comparing the optimizer's parameters with the model's.",
        )


def update_causes(case: Case) -> Iterator[Cause]:
    """Yield why parameters disagree where clipped gradients agree."""
    wrong = case.failed("parameter")
    if wrong and not case.failed("clipped_gradient", "gradient"):
        yield Cause(
            kind="update_differs",
            sentence=f"the optimizer's step of {_some([check.name for check in wrong])} is not that of plain SGD.",
            evidence="the clipped gradients agree; the parameters after the step do not.",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
