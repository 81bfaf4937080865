"""Cross-entropy over logits whose vocabulary is sharded over tensor-parallel ranks.

B batch, L tokens of this context-parallel rank, V vocabulary, T tensor-parallel ranks; rank t holds the columns from
`t * ceil(V / T)` on. Each rank sends two numbers per token; the loss has `[B, L, V]` on no rank.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import all_gather_sequence, mesh_rank
from cp_core import InvalidInputError

_IGNORE_INDEX = -100


def vocab_parallel_loss_sum(
    logits: torch.Tensor, shift_labels: torch.Tensor, *, tp_mesh: DeviceMesh, vocab_size: int
) -> torch.Tensor:
    """Return the summed cross-entropy of the tokens that have a label, the same on all ranks of the mesh.

    Args:
        logits: `[B, L, V / T]`, this rank's columns; the last ranks may have fewer.
        shift_labels: `[B, L]`, the same on all ranks, -100 where nothing is to predict.
        tp_mesh: 1-D mesh of the ranks that share the vocabulary.
        vocab_size: V.

    Returns:
        0-d, in fp32 or wider; 0 if no token has a label.

    Backward: each rank gets the gradient of its own columns; nothing is sent.

    Raises:
        InvalidInputError: If this rank has other columns than its share of V.
    """
    start = _require_share(logits, tp_mesh, vocab_size)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses: torch.Tensor = _VocabParallelLosses.apply(wide, shift_labels, start, tp_mesh)
    return losses.sum()


def gather_vocabulary(logits: torch.Tensor, *, tp_mesh: DeviceMesh, vocab_size: int) -> torch.Tensor:
    """Return the logits of the whole vocabulary, `[B, L, V]`, on all ranks of the mesh; for inference.

    Args:
        logits: `[B, L, V / T]`, this rank's columns; the last ranks may have fewer.
        tp_mesh: 1-D mesh of the ranks that share the vocabulary.
        vocab_size: V.

    Backward: reduce-scatter (sum).

    Raises:
        InvalidInputError: If this rank has other columns than its share of V.
    """
    _require_share(logits, tp_mesh, vocab_size)
    lacking = _columns_of_first(tp_mesh, vocab_size) - logits.shape[-1]
    (gathered,) = all_gather_sequence(torch.nn.functional.pad(logits, (0, lacking)), dim=-1, mesh=tp_mesh)
    return gathered.narrow(-1, 0, vocab_size)


def _columns_of_first(tp_mesh: DeviceMesh, vocab_size: int) -> int:
    return -(-vocab_size // tp_mesh.size())


def _require_share(logits: torch.Tensor, tp_mesh: DeviceMesh, vocab_size: int) -> int:
    """Check that a rank has its share of the vocabulary; return its first column."""
    chunk = _columns_of_first(tp_mesh, vocab_size)
    start = mesh_rank(tp_mesh) * chunk
    share = min(chunk, max(vocab_size - start, 0))
    if logits.shape[-1] != share:
        raise InvalidInputError(
            f"loss_parallel: this rank's share of a vocabulary of {vocab_size} is {share} columns, but its logits have "
            f"{logits.shape[-1]}; the model's output layer must stay sharded."
        )
    return start


class _VocabParallelLosses(torch.autograd.Function):
    """`[B, L, V / T]` and `[B, L]` to the loss of each token `[B, L]`, 0 where there is no label."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, start: int, tp_mesh: DeviceMesh) -> torch.Tensor:
        local, own = labels - start, (labels >= start) & (labels < start + logits.shape[-1])
        local = local.clamp(0, max(logits.shape[-1] - 1, 0))
        target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(own, 0)
        parts = torch.stack([logits.logsumexp(dim=-1), target]).unsqueeze(0)
        (gathered,) = all_gather_sequence(parts, dim=0, mesh=tp_mesh)
        normalizer, target = gathered[:, 0].logsumexp(dim=0), gathered[:, 1].sum(dim=0)
        ctx.save_for_backward(logits, normalizer, local, own, labels)
        return (normalizer - target).where(labels != _IGNORE_INDEX, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, normalizer, local, own, labels = ctx.saved_tensors
        probabilities = (logits - normalizer.unsqueeze(-1)).exp_()
        probabilities.scatter_add_(-1, local.unsqueeze(-1), -own.unsqueeze(-1).to(probabilities.dtype))
        weight = gradients[0].where(labels != _IGNORE_INDEX, 0)
        return probabilities.mul_(weight.unsqueeze(-1)), None, None, None
