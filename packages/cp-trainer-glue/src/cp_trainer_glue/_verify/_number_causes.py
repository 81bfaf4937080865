"""Why token count, loss, norm, optimizer or parameters disagree where the forward and the gradients agree."""

import math
from collections.abc import Iterator, Sequence

from ._batches import IGNORED
from ._case import Case
from ._cause import Cause
from ._check import relative_error, some
from ._weighting import Part, Weighting, known_factor, loss_of, parts_of, weightings


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
            evidence=f"ranks log {some([f'{value:.6g}' for value in found])}; one device {case.expected.loss:.6g}.",
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
            sentence=f"the optimizer's step of {some([check.name for check in wrong])} is not that of plain SGD.",
            evidence="the clipped gradients agree; the parameters after the step do not.",
        )
