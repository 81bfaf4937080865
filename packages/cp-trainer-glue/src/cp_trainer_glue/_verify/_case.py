"""A step in which something disagrees, with all that is known of it; on the first rank."""

from dataclasses import dataclass

import torch

from ._batches import GlobalBatch
from ._check import Check, Tolerances
from ._compare import found_tokens
from ._declared import DeclaredStep
from ._gathered import GatheredStep
from ._reference import Reference, ReferenceStep
from ._weighting import Sizes, sizes_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What the causes are looked for in."""

    checks: tuple[Check, ...]
    declared: DeclaredStep
    gathered: GatheredStep
    expected: ReferenceStep
    # One device, with the parameters where the step began.
    reference: Reference
    tolerances: Tolerances
    # By rank, the gradients that are not the same on all ranks, some of them.
    replicas: tuple[dict[str, torch.Tensor | None], ...]

    def failed(self, *kinds: str) -> list[Check]:
        """Return the checks of some kinds that failed, in order."""
        return [check for check in self.checks if check.kind in kinds and not check.passed]

    @property
    def sizes(self) -> Sizes:
        """The degrees of the run."""
        return sizes_of(self.gathered)

    def labels_as_given(self, batch: GlobalBatch) -> torch.Tensor:
        """Return the labels that the declared run's loss was given, in global order."""
        found = found_tokens(self.gathered, batch, "shift_labels")
        return batch.shift_labels if found is None else found

    def starts(self, batch: GlobalBatch) -> list[int]:
        """Return the first global position of each context-parallel rank's first chunk, by rank."""
        views = self.gathered.views[batch.micro_batch]
        ranks = range(self.gathered.cp_size)
        return [int(views[self.gathered.rank_at(batch.dp_rank, cp)].positions[0]) for cp in ranks]

    def shard_ends(self, batch: GlobalBatch) -> set[int]:
        """Return the last global position of every chunk of every rank, but for the end of the sequence."""
        length = batch.shift_labels.shape[1]
        views = self.gathered.views[batch.micro_batch]
        chunks = [chunk for view in views for chunk in view.chunks or ()]
        return {chunk.stop - 1 for chunk in chunks if chunk.stop < length}

    def owner(self, batch: GlobalBatch) -> torch.Tensor:
        """Return `[P]`: the context-parallel rank that holds each position."""
        views = self.gathered.views[batch.micro_batch]
        owner = torch.zeros(max(int(view.positions.max()) for view in views) + 1, dtype=torch.long)
        for cp_rank in range(self.gathered.cp_size):
            owner[views[self.gathered.rank_at(batch.dp_rank, cp_rank)].positions] = cp_rank
        return owner

    def local_index(self, batch: GlobalBatch) -> torch.Tensor:
        """Return `[P]`: where each position stands within its rank's shard."""
        views = self.gathered.views[batch.micro_batch]
        local = torch.zeros(len(self.owner(batch)), dtype=torch.long)
        for cp_rank in range(self.gathered.cp_size):
            index = views[self.gathered.rank_at(batch.dp_rank, cp_rank)].positions
            local[index] = torch.arange(len(index))
        return local

    def batch_at(self, dp_rank: int, micro_batch: int) -> GlobalBatch:
        """Return one of the step's batches."""
        return next(b for b in self.gathered.batches if (b.dp_rank, b.micro_batch) == (dp_rank, micro_batch))
