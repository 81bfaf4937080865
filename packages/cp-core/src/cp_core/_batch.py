"""The batch contract: a global batch in, this rank's shard and its layout out, and the way back to global order.

B batch, S real global length, P padded global length, C ranks, L = P / C local length.

Labels are shifted and positions are made on the global sequence, before anything is cut: a shard cannot know the target
of its last token, nor where it starts. With S = 6 and C = 2:

    input_ids     a b c | d e f        labels        a b c d e f
    position_ids  0 1 2 | 3 4 5        shift_labels  b c d | e f -100
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import (
    ContextParallelError,
    InvalidInputError,
    agree,
    all_gather_sequence,
    gather_objects,
    mesh_rank,
    mesh_size,
)

from ._batch_fields import TOKEN_FIELDS, global_fields
from ._digest import tensor_digest
from ._labels import IGNORE_INDEX
from ._layout import SequenceLayout


class PaddingRule(Protocol):
    """What the batch contract asks of a strategy."""

    def padding_multiple(self, cp_size: int) -> int:
        """Return what the global sequence length must be a multiple of."""
        ...


def shard_batch_for_cp(
    batch: Mapping[str, Any],
    cp_mesh: DeviceMesh | None,
    *,
    strategy: PaddingRule | Sequence[PaddingRule] | None = None,
    multiple_of: int = 1,
) -> dict[str, Any]:
    """Cut a global batch into this rank's shard.

    Every rank of the mesh passes the same global batch; that it is the same is checked through the control plane. Its
    length may differ from step to step, and be less than C.

    Args:
        batch: `input_ids` `[B, S]`, `inputs_embeds` `[B, S, H]`, or both, and what else of these it has:

            - `labels` or `shift_labels` `[B, S]`, -100 where nothing is to learn; if both, they must agree. `labels`
              stand beside their own tokens and are shifted here. A pad predicts nothing: with pads at the left, the
              last of them does not get the first real token as its target, as it would in a model of transformers.
            - `loss_weights` `[B, S]` in floating point, where the labels stand: shifted with `labels`, and taken as
              they are beside `shift_labels` alone. See `mean_global_loss` for the mean.
            - `attention_mask` `[B, S]`, global: bool, 0 and 1, or additive (0 and -inf or the dtype's smallest value).
              Pads stand before and after the real tokens of a row, in each row another number of them; labels on pads
              must be -100, and a row may be all pads.
            - `position_ids` `[B, S]` or `[1, S]` that count up by one over the real tokens of each row; those of pads
              are not read. Without it positions count from 0 over the row, pads included.
            - fields that tell documents apart (`cu_seqlens`, `seq_lens`, `document_ids` and their kin), only if they
              say one document per row; then they say nothing and are left out.
            - other entries, which pass if they hold no tensor with a dim of length S or B * S.
        cp_mesh: 1-D mesh; None or one rank keeps the whole sequence.
        strategy: The declared method or methods; the sequence is padded to the least common multiple of their rules.
            None pads to C, as all-gather does.
        multiple_of: A further multiple of the padded length.

    Returns:
        A new dict of contiguous tensors `[B, L]`: the token fields, through which gradients reach the global
        `inputs_embeds`; `shift_labels`, -100 where nothing is to predict; `loss_weights`, 0 there; `position_ids`, none
        negative, which go on counting over pads (0 before a row that starts at 0). Besides what passed through, and
        `cp_layout`, the `SequenceLayout`. Never `labels` or `attention_mask`.

    Raises:
        InvalidInputError: On a batch that is sharded already, differs between ranks, or does not fit the contract.
        UnsupportedError: On caches, packed documents, masks per query and pads between real tokens.
    """
    rules = strategy if isinstance(strategy, Sequence) else [] if strategy is None else [strategy]
    fields, multiple = _agreed(batch, cp_mesh, rules, multiple_of)
    layout = SequenceLayout.contiguous(
        global_length=fields["position_ids"].shape[1],
        multiple_of=multiple,
        cp_size=mesh_size(cp_mesh),
        cp_rank=mesh_rank(cp_mesh),
        real_keys=fields.get("attention_mask"),
    )
    local = {name: _shard(name, value, layout) for name, value in fields.items() if name != "attention_mask"}
    return {**local, "cp_layout": layout}


def sequence_multiple(cp_size: int, rules: Sequence[PaddingRule], *, multiple_of: int = 1) -> int:
    """Return what a global sequence is padded to a multiple of, by all the rules that hold for it.

    Args:
        cp_size: C.
        rules: The declared strategies.
        multiple_of: A further multiple.

    Raises:
        InvalidInputError: If `multiple_of` is less than 1.
    """
    if multiple_of < 1:
        raise InvalidInputError(f"multiple_of must be at least 1, but got {multiple_of}.")
    return math.lcm(cp_size, multiple_of, *(rule.padding_multiple(cp_size) for rule in rules))


def unshard_sequence(x: torch.Tensor, dim: int, cp_mesh: DeviceMesh | None, layout: SequenceLayout) -> torch.Tensor:
    """Gather a sharded tensor to global order and drop the pads.

    Args:
        x: This rank's shard, L long in `dim`, for example logits `[B, L, V]`.
        dim: The sequence dim.
        cp_mesh: 1-D mesh.
        layout: The `cp_layout` of the batch.

    Returns:
        The global tensor, S long in `dim`, the same on all ranks.

    Raises:
        InvalidInputError: If `x` is not L long in `dim`.

    Backward: reduce-scatter (sum): each rank's shard gets the gradients that all ranks have for it.
    """
    if x.shape[dim] != layout.local_length:
        raise InvalidInputError(
            f"dim {dim} of a shard must be {layout.local_length} long as its layout says, but got {tuple(x.shape)}."
        )
    (gathered,) = all_gather_sequence(x, dim=dim, mesh=cp_mesh)
    shards = gather_objects(layout.chunks, mesh=cp_mesh)
    index = torch.cat([torch.arange(start, stop) for chunks in shards for start, stop in chunks])
    if not torch.equal(index, torch.arange(layout.padded_length)):
        gathered = gathered.index_select(dim, index.argsort().to(x.device))
    return gathered.narrow(dim, 0, layout.global_length)


def _agreed(
    batch: Mapping[str, Any], cp_mesh: DeviceMesh | None, rules: Sequence[PaddingRule], multiple_of: int
) -> tuple[dict[str, Any], int]:
    """Return the completed global fields and the padding multiple, after all ranks agreed that theirs are the same."""
    fields: dict[str, Any] = {}
    multiple = 1
    error: Exception | None = None
    try:
        fields = global_fields(batch)
        multiple = sequence_multiple(mesh_size(cp_mesh), rules, multiple_of=multiple_of)
    except ContextParallelError as found:
        error = found
    except Exception as found:  # all ranks stop with its words, or the others would wait for this one
        error = InvalidInputError(f"the batch cannot be read: {type(found).__name__}: {found}")
        error.__cause__ = found
    agree(error, mesh=cp_mesh)
    if mesh_size(cp_mesh) > 1:
        digests = {name: tensor_digest(value) for name, value in fields.items() if isinstance(value, torch.Tensor)}
        digests["the multiple it is padded to"] = str(multiple)
        _refuse_different_batches(gather_objects(digests, mesh=cp_mesh))
    return fields, multiple


def _refuse_different_batches(digests: Sequence[Mapping[str, str]]) -> None:
    first = digests[0]
    for rank, other in enumerate(digests):
        names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if names:
            raise InvalidInputError(
                f"every context-parallel rank must pass the same global batch, but rank {rank} differs from rank 0 in "
                f"{', '.join(names)}; read the same samples on all of them, and pass the batch before any sharding."
            )


def _shard(name: str, value: Any, layout: SequenceLayout) -> Any:
    """Pad one field to P and cut out this rank's positions; what has no sequence dim passes."""
    pads = layout.padded_length - layout.global_length
    if name == "position_ids":
        after = value[:, -1:] + torch.arange(1, pads + 1, device=value.device)
        padded = torch.cat([value, after], dim=1)
    elif name == "shift_labels":
        padded = torch.nn.functional.pad(value, (0, pads), value=IGNORE_INDEX)
    elif name == "loss_weights":
        padded = torch.nn.functional.pad(value, (0, pads))
    elif name in TOKEN_FIELDS:
        padded = torch.nn.functional.pad(value, (0, 0) * (value.ndim - 2) + (0, pads))
    else:
        return value
    return torch.cat([padded[:, start:stop] for start, stop in layout.chunks], dim=1)
