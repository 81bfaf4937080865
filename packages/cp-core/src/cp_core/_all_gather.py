"""Colossal (all-gather) context parallelism: queries stay, keys and values are gathered.

    q [B, N, L, D] ------------------------------------> attention over S keys -> [B, N, L, D]
    k, v [B, Nkv, L, D] -> one all-gather -> [B, Nkv, S, D] --^

Works for any number of heads. Bytes per rank and layer: `2 * B * Nkv * D * L * (C - 1)` elements each way.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import (
    InvalidInputError,
    LifecycleError,
    PendingCollective,
    UnsupportedError,
    all_gather_sequence,
    launch_all_gather,
    mesh_size,
)

from ._launch_state import LaunchState
from ._local_attention import KeyValueRecall
from ._meta import AttentionMeta, AttentionShape, HandoffMeta
from ._strategy import ContextParallelStrategy, extended_state, refuse_fields
from .kernels import block_kernel

_SEQUENCE_DIM = 2
_REFUSED_FIELDS = {
    "softcap": "capped scores",
    "dropout_p": "attention dropout",
    "mask": "an explicit attention mask",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherStrategy(ContextParallelStrategy):
    """Synchronous or asynchronous Colossal: one gather of K and V forward, one exchange of their gradients backward.

    Args:
        backward_kv: `"saved"` keeps the gathered keys and values for backward. `"regathered"` keeps the local ones only
            and gathers them once more there: less memory, one more message of the forward's size.
    """

    backward_kv: Literal["saved", "regathered"] = "saved"

    def __post_init__(self) -> None:
        if self.backward_kv not in ("saved", "regathered"):
            raise InvalidInputError(
                f"AllGatherStrategy: backward_kv must be 'saved' or 'regathered', but got {self.backward_kv!r}."
            )

    def padding_multiple(self, cp_size: int) -> int:
        return cp_size

    def validate_shape(self, cp_size: int, shape: AttentionShape) -> None:
        if not shape.dtype.is_floating_point:
            raise InvalidInputError(f"{shape.fqn}: attention needs a floating-point dtype, but got {shape.dtype}.")
        block_kernel(shape.device, shape.dtype).check_head_dim(shape.head_dim, fqn=shape.fqn)

    def check_meta(self, attention_meta: AttentionMeta, *, layer: str | None) -> None:
        refuse_fields(attention_meta, _REFUSED_FIELDS, method="AllGatherStrategy", layer=layer)
        if attention_meta.layout.document_bounds is not None:
            raise UnsupportedError(f"{layer or 'attention'}: packed documents are not supported in this version.")
        if attention_meta.window is not None and not attention_meta.causal:
            raise UnsupportedError(
                f"{layer or 'attention'}: a window of non-causal attention is not supported in this version."
            )

    def launch(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        cp_mesh: DeviceMesh | None,
        handoff_meta: HandoffMeta,
    ) -> LaunchState:
        given = {name: tensor for name, tensor in (("k", k), ("v", v)) if tensor is not None}
        if not given:
            raise LifecycleError(
                f"layer {handoff_meta.layer!r}: AllGatherStrategy launches k and v, but neither was given; queries "
                "stay on their rank."
            )
        handle = launch_all_gather(*given.values(), dim=_SEQUENCE_DIM, mesh=cp_mesh, layer=handoff_meta.layer)
        return extended_state(handoff_meta, cp_mesh, tuple(given), handle)

    def wait(
        self, state: LaunchState, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: AttentionMeta
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gathered = state.collect()
        missing = {"k", "v"} - gathered.keys()
        if missing:
            raise LifecycleError(f"layer {state.layer!r}: {', '.join(sorted(missing))} was never launched.")
        return q, gathered["k"], gathered["v"]

    def recall(
        self, k: torch.Tensor, v: torch.Tensor, *, cp_mesh: DeviceMesh | None, layer: str | None
    ) -> KeyValueRecall | None:
        if self.backward_kv == "saved" or mesh_size(cp_mesh) == 1:
            return None

        def gather(local_k: torch.Tensor, local_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                global_k, global_v = all_gather_sequence(local_k, local_v, dim=_SEQUENCE_DIM, mesh=cp_mesh, layer=layer)
            return global_k, global_v

        return KeyValueRecall(k.detach(), v.detach(), gather)

    def launch_output(
        self, output: torch.Tensor, *, cp_mesh: DeviceMesh | None, attention_meta: AttentionMeta
    ) -> LaunchState:
        # Queries never left, so the output is home; the state keeps the contract of one wait per launch.
        handle = PendingCollective(lambda: (output,), name="output")
        return LaunchState(layer=None, mesh=cp_mesh, pending={("output",): handle})

    def wait_output(self, state: LaunchState, *, attention_meta: AttentionMeta) -> torch.Tensor:
        return state.collect()["output"]
