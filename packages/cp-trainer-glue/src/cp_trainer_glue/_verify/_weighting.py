"""Ways in which the parts of a step may have been put together, each worked out from the parts of one device.

A part is what the labels of one context-parallel rank add to one micro-batch of one data-parallel rank. Right is the
sum of all parts over the labels of the whole step; known mistakes weigh the parts otherwise.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ._batches import IGNORED, GlobalBatch
from ._gathered import GatheredStep
from ._reference import Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What the labels of one rank add to loss and gradients."""

    dp: int
    cp: int
    micro_batch: int
    # Its labels, or the sum of their weights.
    weight: float
    loss_sum: float
    # Of the parameters that are looked at.
    gradients: Mapping[str, torch.Tensor]


class Weighting(NamedTuple):
    """One way to put parts together."""

    kind: str
    # What is done, as the end of "each gradient is ... ".
    sentence: str
    # Of each part; 1 / all labels would be right.
    weights: tuple[float, ...]
    # Whether some parts are not added at all.
    lacks_parts: bool = False


class Sizes(NamedTuple):
    """Degrees that a factor may come from."""

    dp: int
    cp: int
    tp: int
    micro_batches: int


def sizes_of(gathered: GatheredStep) -> Sizes:
    """Return the degrees of a step."""
    dp, cp, tp = (1 + max(place[axis] for place in gathered.coordinates) for axis in range(3))
    return Sizes(dp, cp, tp, len(gathered.views))


def parts_of(
    gathered: GatheredStep,
    reference: Reference,
    names: Sequence[str],
    *,
    labels_of: Callable[[GlobalBatch], torch.Tensor],
) -> list[Part]:
    """Compute every part on one device, at the parameters where the step began.

    Args:
        gathered: The step.
        reference: One device, rewound.
        names: Parameters whose gradients are wanted.
        labels_of: `[B, S]` labels of a batch.
    """
    parts = []
    for batch in gathered.batches:
        labels = labels_of(batch)
        for cp_rank in range(gathered.cp_size):
            own = _labels_of_rank(gathered, batch, labels, cp_rank)
            loss_sum, gradients = reference.partial_loss(batch, own, names)
            parts.append(
                Part(
                    dp=batch.dp_rank,
                    cp=cp_rank,
                    micro_batch=batch.micro_batch,
                    weight=reference.weight_of(batch, own),
                    loss_sum=loss_sum,
                    gradients=gradients,
                )
            )
    return parts


def _labels_of_rank(gathered: GatheredStep, batch: GlobalBatch, labels: torch.Tensor, cp_rank: int) -> torch.Tensor:
    index = gathered.views[batch.micro_batch][gathered.rank_at(batch.dp_rank, cp_rank)].positions
    held = index[index < labels.shape[1]]
    own = torch.full_like(labels, IGNORED)
    own[:, held] = labels[:, held]
    return own


def weightings(parts: Sequence[Part], sizes: Sizes) -> Iterator[Weighting]:
    """Yield the known mistakes, from the one with the simplest words on."""
    total = sum(part.weight for part in parts) or 1.0
    yield from _means(parts)
    yield from _shares(parts, sizes, total)


_Key = Callable[[Part], Hashable]


def _rank_of(part: Part) -> tuple[int, int]:
    return part.dp, part.cp


def _means(parts: Sequence[Part]) -> Iterator[Weighting]:
    """Yield losses that are divided group by group."""
    whole = "instead of over all tokens of the step"
    kinds: list[tuple[str, str, _Key, bool]] = [
        ("mean_per_rank", f"a mean per rank, averaged over ranks, {whole}", _rank_of, True),
        (
            "mean_per_rank_and_micro_batch",
            f"a mean per rank and micro-batch, averaged, {whole}",
            lambda part: (part.dp, part.cp, part.micro_batch),
            True,
        ),
        ("mean_per_micro_batch", f"a mean per micro-batch, averaged, {whole}", lambda part: part.micro_batch, True),
        ("mean_per_dp_rank", f"a mean per data-parallel rank, averaged, {whole}", lambda part: part.dp, True),
        (
            "tokens_over_dp_only",
            "divided by tokens that are counted over data parallel only: each context-parallel rank counts its own",
            lambda part: part.cp,
            False,
        ),
        ("tokens_of_rank_only", "a sum of means per rank: each rank divides by its own tokens alone", _rank_of, False),
        (
            "tokens_over_cp_only",
            "divided by tokens that are counted over context parallel only: each data-parallel rank counts its own",
            lambda part: part.dp,
            False,
        ),
        (
            "tokens_of_micro_batch_only",
            f"a sum of means per micro-batch, each over its own tokens {whole}",
            lambda part: part.micro_batch,
            False,
        ),
    ]
    for kind, sentence, key, averaged in kinds:
        weights = _divided_by_group(parts, key, averaged=averaged)
        if weights is not None:
            yield Weighting(kind, sentence, weights)


def _divided_by_group(parts: Sequence[Part], key: _Key, *, averaged: bool) -> tuple[float, ...] | None:
    groups: dict[Hashable, float] = {}
    for part in parts:
        groups[key(part)] = groups.get(key(part), 0.0) + part.weight
    if len(groups) == 1:
        return None
    factor = 1 / len(groups) if averaged else 1.0
    return tuple(factor / (groups[key(part)] or 1.0) for part in parts)


def _shares(parts: Sequence[Part], sizes: Sizes, total: float) -> Iterator[Weighting]:
    """Yield sums that lack parts."""
    kinds: list[tuple[str, str, int, Callable[[Part], int]]] = [
        ("part_of_cp_rank", "only context-parallel rank {}'s part: the others' is not added", sizes.cp, lambda p: p.cp),
        ("part_of_dp_rank", "only data-parallel rank {}'s part: the others' is not added", sizes.dp, lambda p: p.dp),
        (
            "part_of_micro_batch",
            "only micro-batch {}'s part: the others of the accumulation window are lost",
            sizes.micro_batches,
            lambda p: p.micro_batch,
        ),
    ]
    for kind, sentence, size, axis in kinds:
        for index in range(size if size > 1 else 0):
            yield Weighting(kind, sentence.format(index), tuple((axis(p) == index) / total for p in parts), True)
    if sizes.cp > 1 and sizes.dp > 1:
        for first in {(p.dp, p.cp): p for p in parts}.values():
            held = tuple(((p.dp, p.cp) == (first.dp, first.cp)) / total for p in parts)
            sentence = f"only the part of data-parallel rank {first.dp}, context-parallel rank {first.cp}"
            yield Weighting("part_of_rank", f"{sentence}: the others' is not added", held, True)


def gradient_of(parts: Sequence[Part], weights: Sequence[float], name: str) -> torch.Tensor:
    """Return the gradient that weights give."""
    return torch.stack(
        [part.gradients[name].double() * weight for part, weight in zip(parts, weights, strict=True)]
    ).sum(0)


def loss_of(parts: Sequence[Part], weights: Sequence[float]) -> float:
    """Return the loss that weights give."""
    return sum(part.loss_sum * weight for part, weight in zip(parts, weights, strict=True))


def known_factor(ratio: float, sizes: Sizes, limit: float) -> str | None:
    """Return where a factor may come from, such as "cp_size"; None if it is none of these."""
    named = {"cp_size": sizes.cp, "dp_size": sizes.dp, "tp_size": sizes.tp, "accumulation steps": sizes.micro_batches}
    named["dp_size x cp_size"] = sizes.dp * sizes.cp
    named["number of ranks"] = sizes.dp * sizes.cp * sizes.tp
    fitting = [name for name, size in named.items() if size > 1 and abs(ratio / size - 1) <= limit]
    fitting += [f"1 / {name}" for name, size in named.items() if size > 1 and abs(ratio * size - 1) <= limit]
    return " = ".join(fitting) or None
