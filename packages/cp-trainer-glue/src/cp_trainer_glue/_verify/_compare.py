"""Every number of a step of the declared run beside the same number of one device."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ._batches import GlobalBatch
from ._capture import LOGITS
from ._check import Check, Place, Tolerances, distance, relative_error, some
from ._declared import DeclaredStep, Tensors
from ._gathered import GatheredStep, ShardView, in_global_order
from ._narrow import FP32_SUM
from ._options import LEARNING_RATE
from ._reference import ReferenceStep


def compare_step(
    number: int, declared: DeclaredStep, gathered: GatheredStep, reference: ReferenceStep, tolerances: Tolerances
) -> list[Check]:
    """Return every check of a step, in the order in which a step computes; called on the first rank.

    Args:
        number: The step, from 1.
        declared, gathered: The declared run, as the first rank saw it and put together.
        reference: The same step on one device.
        tolerances: What rounding explains.
    """
    allowed = _Allowed.of(reference, tolerances)
    checks = [
        *_input_checks(gathered),
        *_output_checks(gathered, reference, tolerances),
        *_number_checks(gathered, reference, tolerances, allowed),
        *_gradient_checks(declared.gradients, reference.gradients, tolerances, allowed.gradient, kind="gradient"),
        *_replica_checks(declared.gradients, "gradient"),
        *_gradient_checks(declared.clipped, reference.clipped, tolerances, allowed.clipped, kind="clipped_gradient"),
        *_parameter_checks(declared.parameters, reference.parameters, allowed.parameter),
        *_replica_checks(declared.parameters, "parameter"),
        *_optimizer_checks(gathered),
        *_pending_checks(gathered),
    ]
    return [_at_step(check, number) for check in checks]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Allowed:
    """What may differ in a step: the tolerances, and what a sum in fp32 adds, from the gradient on to the parameter."""

    reference: ReferenceStep
    tolerances: Tolerances
    # Of the norm, relative.
    added_to_norm: float

    @classmethod
    def of(cls, reference: ReferenceStep, tolerances: Tolerances) -> "_Allowed":
        """Work out what the sums in fp32 of a step add to its norm."""
        rounded = [g for name, g in reference.gradients.items() if g is not None and name in reference.used_in_fp32]
        size = math.sqrt(sum(float(g.double().norm()) ** 2 for g in rounded))
        added = FP32_SUM * size / reference.grad_norm if size else 0.0
        return cls(reference=reference, tolerances=tolerances, added_to_norm=added)

    @property
    def grad_norm(self) -> float:
        """Relative error of the norm."""
        return self.tolerances.grad_norm + self.added_to_norm

    def gradient(self, name: str) -> float:
        """Relative error of a parameter's gradient."""
        return self.tolerances.gradient + self._added_to_sum(name)

    def clipped(self, name: str) -> float:
        """Relative error of the gradient that is clipped by the norm."""
        return self.gradient(name) + self.added_to_norm

    def parameter(self, name: str) -> float:
        """Relative error of a parameter that made a step of SGD with its clipped gradient."""
        added = self._added_to_sum(name) + self.added_to_norm
        gradient, parameter = self.reference.clipped.get(name), self.reference.parameters.get(name)
        if not added or gradient is None or parameter is None:
            return self.tolerances.parameter
        size = float(parameter.double().norm()) or 1.0
        return self.tolerances.parameter + LEARNING_RATE * added * float(gradient.double().norm()) / size

    def _added_to_sum(self, name: str) -> float:
        return FP32_SUM if name in self.reference.used_in_fp32 else 0.0


def _at_step(check: Check, number: int) -> Check:
    return Check(
        name=check.name,
        kind=check.kind,
        step=number,
        error=check.error,
        limit=check.limit,
        detail=check.detail,
        place=check.place,
    )


def _check(
    kind: str, name: str, error: float, limit: float = 0.0, *, detail: str = "", place: Place | None = None
) -> Check:
    return Check(name=name, kind=kind, step=0, error=error, limit=limit, detail=detail, place=place)


# --- what ranks were given ----------------------------------------------------------------------------------------


def _input_checks(gathered: GatheredStep) -> Iterator[Check]:
    others = gathered.other_batches
    detail = f"ranks {', '.join(map(str, others))} read another batch than their peers" if others else ""
    yield _check("inputs", "global batches of context- and tensor-parallel ranks", float(len(others)), detail=detail)
    repeated = gathered.repeated_batches
    detail = f"data-parallel ranks {', '.join(map(str, repeated))} read what another one reads" if repeated else ""
    yield _check("inputs", "batches of data-parallel ranks", float(len(repeated)), detail=detail)
    for kind, name in (("inputs", "input_ids"), ("positions", "position_ids"), ("labels", "shift_labels")):
        places = [place for batch in gathered.batches for place in _differing_tokens(gathered, batch, name)]
        if any(found_tokens(gathered, batch, name) is not None for batch in gathered.batches):
            detail = f"{len(places)} tokens differ" if places else ""
            yield _check(kind, name, float(len(places)), detail=detail, place=places[0] if places else None)


def expected_tokens(batch: GlobalBatch, name: str) -> torch.Tensor | None:
    """Return a field of a whole batch `[B, S]`, None if it has none."""
    if name == "shift_labels":
        return batch.shift_labels
    value = batch.inputs.get(name)
    return value if isinstance(value, torch.Tensor) else None


def found_tokens(gathered: GatheredStep, batch: GlobalBatch, name: str) -> torch.Tensor | None:
    """Return the same field as the ranks were given it, in global order, None if they were given none."""
    views = gathered.views[batch.micro_batch]
    shards: list[tuple[ShardView, torch.Tensor]] = []
    for cp_rank in range(gathered.cp_size):
        view = views[gathered.rank_at(batch.dp_rank, cp_rank)]
        value = view.shift_labels if name == "shift_labels" else view.received.get(name)
        if value is None:
            return None
        shards.append((view, value.expand(batch.shift_labels.shape[0], *value.shape[1:])))
    return in_global_order(shards)[:, : batch.shift_labels.shape[1]]


def _differing_tokens(gathered: GatheredStep, batch: GlobalBatch, name: str) -> list[Place]:
    expected, found = expected_tokens(batch, name), found_tokens(gathered, batch, name)
    if expected is None or found is None:
        return []
    return _places(((expected != found) & batch.real), batch)


def _places(wrong: torch.Tensor, batch: GlobalBatch) -> list[Place]:
    """Return the true entries of `[B, S]`, by position first."""
    found = sorted((position, row) for row, position in wrong.nonzero().tolist())
    where = {"dp_rank": batch.dp_rank, "micro_batch": batch.micro_batch}
    return [Place(position=position, row=row, **where) for position, row in found]


# --- what layers gave ---------------------------------------------------------------------------------------------


def _output_checks(gathered: GatheredStep, reference: ReferenceStep, tolerances: Tolerances) -> Iterator[Check]:
    ran: dict[str, None] = {}
    for side in (reference.outputs, gathered.outputs):
        for outputs in side.values():
            ran |= dict.fromkeys(outputs)
    for name in sorted(ran, key=lambda name: name == LOGITS):  # a stable sort: the rest stays in order
        kind = LOGITS if name == LOGITS else "layer"
        error, detail, place = _output_error(name, gathered, reference, tolerances.output)
        yield _check(kind, name, error, tolerances.output, detail=detail, place=place)


def _output_error(
    name: str, gathered: GatheredStep, reference: ReferenceStep, limit: float
) -> tuple[float, str, Place | None]:
    worst, first = 0.0, None
    for batch in gathered.batches:
        key = (batch.dp_rank, batch.micro_batch)
        found, expected = gathered.outputs.get(key, {}).get(name), reference.outputs.get(key, {}).get(name)
        if found is None or expected is None:
            side = "declared run" if found is None else "reference"
            return math.inf, f"did not run in the {side}, or gave no [B, S, ...] there", None
        if found.shape != expected.shape:
            return math.inf, f"is {tuple(found.shape)}, but {tuple(expected.shape)} on one device", None
        errors = token_errors(found, expected, batch.real)
        worst = max(worst, _largest(errors))
        wrong = _places(~(errors <= limit), batch)
        if wrong and first is None:
            first = wrong[0]
    return worst, "", first


def token_errors(found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return `[B, S]`: how far each token is off, relative to the largest token; 0 for pads."""
    difference = (found.double() - expected.double()).flatten(2).norm(dim=2)
    scale = expected.double().flatten(2).norm(dim=2).masked_fill(~real, 0).max().clamp(min=1e-300)
    errors: torch.Tensor = (difference / scale).masked_fill(~real, 0)
    return errors


def _largest(errors: torch.Tensor) -> float:
    return math.nan if bool(errors.isnan().any()) else float(errors.max())


# --- numbers ------------------------------------------------------------------------------------------------------


def _number_checks(
    gathered: GatheredStep, reference: ReferenceStep, tolerances: Tolerances, allowed: "_Allowed"
) -> Iterator[Check]:
    for kind, limit, expected in (
        ("valid_tokens", 0.0, float(reference.valid_tokens)),
        ("loss", tolerances.loss, reference.loss),
        ("grad_norm", allowed.grad_norm, reference.grad_norm),
    ):
        found = [float(getattr(scalars, kind)) for scalars in gathered.scalars]
        errors = [relative_error(value, expected) for value in found]
        rank = max(range(len(errors)), key=lambda rank: math.inf if math.isnan(errors[rank]) else errors[rank])
        detail = "" if errors[rank] <= limit else f"{found[rank]:.10g} on rank {rank}, {expected:.10g} on one device"
        yield _check(kind, kind, errors[rank], limit, detail=detail)


# --- gradients and parameters -------------------------------------------------------------------------------------


def gradient_floor(expected: Mapping[str, torch.Tensor | None], tolerances: Tolerances) -> float:
    """Return the norm below which a gradient is zero but for rounding."""
    norms = [float(g.double().norm()) for g in expected.values() if g is not None]
    return max(norms, default=0.0) * tolerances.gradient_floor / tolerances.gradient


def _gradient_checks(
    found: Tensors,
    expected: Mapping[str, torch.Tensor | None],
    tolerances: Tolerances,
    limit: Callable[[str], float],
    *,
    kind: str,
) -> Iterator[Check]:
    floor = gradient_floor(expected, tolerances)
    for name in dict.fromkeys([*expected, *found.values]):
        error, detail = _tensor_error(found.values, expected, name, floor)
        yield _check(kind, name, error, limit(name), detail=detail)


def _tensor_error(
    found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None], name: str, floor: float
) -> tuple[float, str]:
    if name not in expected or name not in found:
        return math.inf, f"is a parameter {'on one device' if name in expected else 'in the declared run'} only"
    left, right = found[name], expected[name]
    if left is None or right is None:
        one_sided = "" if left is right else f"None {'on one device' if right is None else 'in the declared run'} only"
        return (math.inf if one_sided else 0.0), one_sided
    if left.shape != right.shape:
        return math.inf, f"is {tuple(left.shape)}, but {tuple(right.shape)} on one device"
    return distance(left, right, floor=floor), ""


def _parameter_checks(
    found: Tensors, expected: Mapping[str, torch.Tensor], limit: Callable[[str], float]
) -> Iterator[Check]:
    for name in dict.fromkeys([*expected, *found.values]):
        error, detail = _tensor_error(found.values, expected, name, 0.0)
        yield _check("parameter", name, error, limit(name), detail=detail)


def _replica_checks(tensors: Tensors, what: str) -> Iterator[Check]:
    differing = tensors.differing
    detail = f"differ between ranks: {some(differing)}" if differing else ""
    yield _check("replicas", f"each {what} on all ranks", float(len(differing)), detail=detail)


def _optimizer_checks(gathered: GatheredStep) -> Iterator[Check]:
    lacking = gathered.scalars[0].not_optimized
    detail = f"not in the optimizer: {some(lacking)}" if lacking else ""
    yield _check("optimizer", "trainable parameters in the optimizer", float(len(lacking)), detail=detail)
    if any(scalars.foreign for scalars in gathered.scalars):
        unlike = len({scalars.foreign for scalars in gathered.scalars}) > 1
        detail = f"{len(gathered.scalars[0].foreign)} parameters of the optimizer are not the model's"
        detail += ", and they differ between ranks" if unlike else ""
        yield _check("optimizer", "parameters of the optimizer in the model", 1.0, detail=detail)


def _pending_checks(gathered: GatheredStep) -> Iterator[Check]:
    pending = [scalars.pending for scalars in gathered.scalars if scalars.pending]
    yield _check("pending", "collectives left in flight", float(len(pending)), detail=pending[0] if pending else "")
