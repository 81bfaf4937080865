"""The contract of a method: what moves between ranks around a local attention, and when."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import (
    InvalidInputError,
    LifecycleError,
    PendingCollective,
    UnsupportedError,
    mesh_rank,
    mesh_size,
)

from ._batch import shard_batch_for_cp
from ._launch_state import LaunchState
from ._layout import Chunk, SequenceLayout
from ._local_attention import KeyValueRecall, local_attention
from ._meta import AttentionMeta, AttentionShape, HandoffMeta


class ContextParallelStrategy(ABC):
    """A context-parallel method, free of any model. Frozen; holds no mesh and no state.

    `launch` and `wait` surround the local attention on its input side, `launch_output` and `wait_output` on its output
    side; `attention` is all of them without distance. Tensors are `[B, N, L, D]`.
    """

    @abstractmethod
    def padding_multiple(self, cp_size: int) -> int:
        """Return what the global sequence length must be a multiple of."""

    @abstractmethod
    def validate_shape(self, cp_size: int, shape: AttentionShape) -> None:
        """Check the method against the heads of one attention; needs no ranks.

        Raises:
            ContextParallelError: Naming module, numbers and what would be right.
        """

    def validate(self, mesh: DeviceMesh | None, shape: AttentionShape) -> None:
        """Check the method against the mesh and the heads of one attention, before the first forward, on all ranks.

        Raises:
            ContextParallelError: Naming module, numbers and what would be right.
        """
        self.validate_shape(mesh_size(mesh), shape)

    @abstractmethod
    def launch(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        cp_mesh: DeviceMesh | None,
        handoff_meta: HandoffMeta,
    ) -> LaunchState:
        """Start what the given local tensors need; what is given together travels together.

        Call again with `handoff_meta.state` set to add tensors that were not ready.
        """

    @abstractmethod
    def wait(
        self, state: LaunchState, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: AttentionMeta
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors that the local attention takes, once."""

    def recall(
        self, k: torch.Tensor, v: torch.Tensor, *, cp_mesh: DeviceMesh | None, layer: str | None
    ) -> KeyValueRecall | None:
        """Return how the local attention gets its keys and values again in backward; None where it keeps them.

        Args:
            k, v: What was launched, `[B, Nkv, L, D]`.
            cp_mesh: 1-D mesh.
            layer: Module name, for traces and errors.
        """
        return None

    @abstractmethod
    def launch_output(
        self, output: torch.Tensor, *, cp_mesh: DeviceMesh | None, attention_meta: AttentionMeta
    ) -> LaunchState:
        """Start the way back of the attention output."""

    @abstractmethod
    def wait_output(self, state: LaunchState, *, attention_meta: AttentionMeta) -> torch.Tensor:
        """Return the output `[B, N, L, D]` of this rank's own tokens, once."""

    @abstractmethod
    def check_meta(self, attention_meta: AttentionMeta, *, layer: str | None) -> None:
        """Refuse by name each field of the meta that this method does not honour."""

    def check_layout(self, layout: SequenceLayout, cp_mesh: DeviceMesh | None, *, layer: str | None) -> None:
        """Refuse a layout that is not this rank's consecutive shard on this mesh.

        Raises:
            InvalidInputError: With the positions found and those of the mesh's rank.
        """
        size, rank, length = mesh_size(cp_mesh), mesh_rank(cp_mesh), layout.local_length
        expected = Chunk(rank * length, (rank + 1) * length)
        if layout.chunks != (expected,) or layout.padded_length != size * length:
            held = ", ".join(f"{start}..{stop - 1}" for start, stop in layout.chunks)
            raise InvalidInputError(
                f"{layer or 'attention'}: the layout holds positions {held} of {layout.padded_length}, but rank {rank} "
                f"of {size} of this mesh has {expected.start}..{expected.stop - 1} of {size * length}; shard the batch "
                "with the cp_mesh that the attention runs on."
            )

    def shard_batch(self, batch: Mapping[str, Any], cp_mesh: DeviceMesh | None) -> dict[str, Any]:
        """Return this rank's shard of a global batch; see `shard_batch_for_cp`."""
        return shard_batch_for_cp(batch, cp_mesh, strategy=self)

    def restore_output(
        self, output: torch.Tensor, *, cp_mesh: DeviceMesh | None, attention_meta: AttentionMeta
    ) -> torch.Tensor:
        """Bring the attention output back to `[B, N, L, D]` of this rank's tokens."""
        state = self.launch_output(output, cp_mesh=cp_mesh, attention_meta=attention_meta)
        return self.wait_output(state, attention_meta=attention_meta)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cp_mesh: DeviceMesh | None,
        attention_meta: AttentionMeta,
        layer: str | None = None,
    ) -> torch.Tensor:
        """Compute global attention for this rank's tokens.

        Args:
            q: `[B, N, L, D]` local queries.
            k, v: `[B, Nkv, L, D]` local keys and values, not expanded to N heads.
            cp_mesh: 1-D mesh; None or one rank computes locally.
            attention_meta: The attention to compute; every field is honoured or refused by name.
            layer: Module name, for traces and errors.

        Returns:
            `[B, N, L, D]`, this rank's rows of the global result.

        Raises:
            ContextParallelError: If shapes do not fit the layout, or a field of the meta is not supported.
        """
        self.check_meta(attention_meta, layer=layer)
        check_local_tensors(q, k, v, attention_meta=attention_meta, layer=layer)
        self.check_layout(attention_meta.layout, cp_mesh, layer=layer)
        handoff = HandoffMeta(layer=layer, attention_meta=attention_meta)
        state = self.launch(q, k, v, cp_mesh=cp_mesh, handoff_meta=handoff)
        recall = self.recall(k, v, cp_mesh=cp_mesh, layer=layer)
        q, k, v = self.wait(state, q, k, v, attention_meta=attention_meta)
        return self.attend_exchanged(q, k, v, cp_mesh=cp_mesh, attention_meta=attention_meta, recall=recall)

    def attend_exchanged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cp_mesh: DeviceMesh | None,
        attention_meta: AttentionMeta,
        recall: KeyValueRecall | None = None,
    ) -> torch.Tensor:
        """Compute the attention of tensors that `wait` returned, whose meta was checked, and restore its output.

        Args:
            q, k, v: What `wait` returned.
            cp_mesh, attention_meta: As in `attention`.
            recall: What `recall` gave for the launched tensors; None where k and v were changed since, as by a module
                that expands them.
        """
        output = local_attention(q, k, v, attention_meta=attention_meta, recall=recall)
        return self.restore_output(output, cp_mesh=cp_mesh, attention_meta=attention_meta)


def extended_state(
    handoff_meta: HandoffMeta,
    cp_mesh: DeviceMesh | None,
    names: tuple[str, ...],
    handle: PendingCollective,
) -> LaunchState:
    """Return the handoff's state with one more launch in it."""
    state = handoff_meta.state or LaunchState(layer=handoff_meta.layer, mesh=cp_mesh, pending={})
    launched = {name for group in state.pending for name in group}
    again = launched.intersection(names)
    if again:
        raise LifecycleError(f"layer {state.layer!r}: {', '.join(sorted(again))} was launched twice for one attention.")
    state.pending[names] = handle
    return state


def check_local_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: AttentionMeta, layer: str | None
) -> None:
    """Refuse tensors that are not `[B, N, L, D]` shards of the layout.

    Raises:
        InvalidInputError: With the shapes found and the layout's length.
    """
    length, padding = attention_meta.layout.local_length, attention_meta.layout.key_padding
    where = "attention" if layer is None else layer
    if any(tensor.ndim != 4 or tensor.shape[2] != length for tensor in (q, k, v)):
        raise InvalidInputError(
            f"{where}: q, k and v must be [B, N, L, D] with L = {length} as the layout says, but got "
            f"{', '.join(str(tuple(tensor.shape)) for tensor in (q, k, v))}; shard the batch with shard_batch_for_cp "
            "and pass its cp_layout."
        )
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise InvalidInputError(
            f"{where}: k and v must have one shape, q the same batch and head dim and a multiple of their heads, but "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    if padding is not None and padding.shape[0] != q.shape[0]:
        raise InvalidInputError(
            f"{where}: the layout holds the pads of {padding.shape[0]} rows, but q, k and v have {q.shape[0]}; a batch "
            "and its cp_layout belong together."
        )
    sinks = attention_meta.sinks
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise InvalidInputError(
            f"{where}: sinks must be one logit per query head, [{q.shape[1]}], but got {list(sinks.shape)}."
        )


def refuse_fields(attention_meta: AttentionMeta, fields: Mapping[str, str], *, method: str, layer: str | None) -> None:
    """Raise for each named field of the meta that differs from its neutral value.

    Args:
        attention_meta: The meta to look at.
        fields: Field name -> what it means to a user.
        method: Name of the method, for the message.
        layer: Module name, for the message.

    Raises:
        UnsupportedError: Naming layer, method and every such field.
    """
    values = {name: getattr(attention_meta, name) for name in fields}
    asked = [
        f"{name} ({fields[name]})"
        for name, value in values.items()
        if value is not None and not (name == "dropout_p" and value == 0)
    ]
    if asked:
        raise UnsupportedError(
            f"{layer or 'attention'}: {method} does not support {', '.join(asked)} in this version; turn it off in the "
            "model's config, or train this model at cp_size 1."
        )
