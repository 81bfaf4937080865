"""From checks that failed to what probably is wrong; nothing is said that the numbers do not bear out."""

from collections.abc import Iterator

from ._case import Case
from ._cause import Cause
from ._forward_causes import forward_causes, where
from ._gradient_causes import given_labels_explain, gradient_causes
from ._number_causes import loss_causes, norm_causes, optimizer_causes, update_causes


def likely_causes(case: Case) -> tuple[Cause, ...]:
    """Return the likely causes of a step in which checks failed, each kind once.

    What is computed later is looked at only where all before it agrees: a wrong layer makes every gradient wrong.
    """
    found: dict[str, Cause] = {}
    for cause in _causes(case):
        found.setdefault(cause.kind, cause)
    return tuple(found.values())


def _causes(case: Case) -> Iterator[Cause]:
    if case.failed("inputs"):
        yield _inputs_cause(case)
        return
    if case.failed("layer", "logits"):
        yield from forward_causes(case)
        return
    yield from optimizer_causes(case)
    if any(scalars.foreign for scalars in case.gathered.scalars):
        return  # trained beside the model, which one device knows nothing of
    explained = False
    if case.failed("labels"):
        rest = given_labels_explain(case)
        explained = rest is not None
        yield _labels_cause(case, rest)
    if not explained:
        yield from gradient_causes(case)
    yield from loss_causes(case)
    if not case.failed("gradient"):
        yield from norm_causes(case)
    yield from update_causes(case)


def _inputs_cause(case: Case) -> Cause:
    check = case.failed("inputs")[0]
    place = f"; first {where(case, check)}" if check.place is not None else ""
    if case.gathered.repeated_batches and not case.gathered.other_batches:
        kind, sentence = "data_read_twice", "data-parallel ranks read the same batches, so each sample counts twice."
    else:
        kind, sentence = "other_tokens", "the ranks together do not hold the tokens of the global batch."
    return Cause(kind=kind, sentence=sentence, evidence=f"{check.name}: {check.detail}{place}.")


def _labels_cause(case: Case, rest: float | None) -> Cause:
    check = case.failed("labels")[0]
    wrong = {
        position
        for batch in case.gathered.batches
        for position in (case.labels_as_given(batch) != batch.shift_labels).any(dim=0).nonzero().flatten().tolist()
    }
    ends = {position for batch in case.gathered.batches for position in case.shard_ends(batch)}
    evidence = f"the labels of positions {', '.join(map(str, sorted(wrong)[:4]))} differ"
    evidence += f", {len(wrong)} in all" if len(wrong) > 4 else ""
    if rest is not None:
        evidence += f"; with them one device's gradients equal the declared run's to {rest:.1e}"
    if wrong <= ends:
        sentence = "labels are shifted on each rank's shard, so the last token of every shard has no right target."
        return Cause(
            kind="labels_shifted_per_rank", sentence=sentence, evidence=f"{evidence}; all of them end a shard."
        )
    sentence = f"the loss is given other labels than those of the global sequence, first at {where(case, check)}."
    return Cause(kind="other_labels", sentence=sentence, evidence=f"{evidence}.")
