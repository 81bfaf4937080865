"""The micro-batches of one optimizer step, whose tokens are counted over all ranks before the first backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import gather_objects
from cp_core import InvalidInputError, count_valid_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The micro-batches of one optimizer step, fetched before its first backward: all their tokens weigh each."""

    # This rank's shards, as `shard_batch` returns them, on the host.
    batches: tuple[dict[str, Any], ...]
    # Labels of each shard.
    counts: tuple[int, ...]
    # Labels of all shards of all ranks.
    valid_tokens: int
    # Weight of each shard's tokens, and of those of all ranks; None where each label weighs 1.
    weights: tuple[float | None, ...]
    weight_sum: float | None

    @classmethod
    def counted(
        cls, batches: Sequence[dict[str, Any]], weights: Sequence[float | None], *, dp_cp_mesh: DeviceMesh
    ) -> Self:
        """Count the labels of shards over all ranks, which all call it.

        Args:
            batches: This rank's shards.
            weights: What the summed loss of each is divided by; None is its number of labels.
            dp_cp_mesh: 1-D mesh of the ranks that hold different tokens.

        Raises:
            InvalidInputError: On all ranks, if there is no batch, or some ranks have fewer.
        """
        counts = tuple(count_valid_tokens(batch["shift_labels"]) for batch in batches)
        own = None if None in weights else math.fsum(weight for weight in weights if weight is not None)
        shares = gather_objects((len(batches), sum(counts), own), mesh=dp_cp_mesh)
        _refuse_unequal_lengths([length for length, _, _ in shares])
        sums = [weight for _, _, weight in shares if weight is not None]
        return cls(
            batches=tuple(batches),
            counts=counts,
            valid_tokens=sum(count for _, count, _ in shares),
            weights=tuple(weights),
            weight_sum=math.fsum(sums) if sums else None,
        )


def _refuse_unequal_lengths(lengths: Sequence[int]) -> None:
    if not any(lengths):
        raise InvalidInputError("the data has ended before train_iters; give more of it, or make build_data endless.")
    if len(set(lengths)) > 1:
        raise InvalidInputError(
            f"the data of data-parallel ranks must end together, but they have {sorted(set(lengths))} micro-batches "
            "left for this step; let build_data give each rank the same number."
        )
