"""All-gather along the sequence, differentiable, in one message for several tensors.

C ranks, L local sequence, S = C * L, W columns of all tensors together (see `_packing`).

Forward: all-gather of `[L, W]` to `[S, W]`. Backward has reduce-scatter semantics (sum): by default an all-to-all of
`[C, L, W]` and a local sum in fp32 or wider, since on gloo a reduce-scatter is an all-reduce in disguise and since
16-bit sums then do not lose bits as C grows.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ._ledger import describe
from ._mesh import group_of
from ._message import Message, Operation
from ._packing import SequencePacking
from ._pending import PendingCollective
from ._trace import forward_phase

GradientReduction = Literal["exchange", "reduce_scatter"]


def all_gather_sequence(
    *tensors: torch.Tensor,
    dim: int,
    mesh: DeviceMesh | None,
    layer: str | None = None,
    reduction: GradientReduction = "exchange",
) -> tuple[torch.Tensor, ...]:
    """Gather tensors along their sequence dim over a 1-D mesh, in one message.

    With C = 2 and S = 8, rank 0 holding positions 0-3 and rank 1 positions 4-7, both get 0-7 in rank order.

    Args:
        *tensors: Tensors of one dtype and device with equal length L in `dim`, for example K and V `[B, N, L, D]`;
            their other dims may differ.
        dim: The sequence dim.
        mesh: 1-D mesh. None or one rank: returns the inputs.
        layer: Name of the asking module, for traces and errors.
        reduction: How gradients are summed in backward: `"exchange"` (all-to-all and a local sum in fp32 or wider), or
            `"reduce_scatter"` (the backend's own).

    Returns:
        One tensor per input, S = C * L long in `dim`: views of one buffer.

    Raises:
        InvalidInputError: If the tensors do not fit one message, or the mesh has several axes.

    Backward: reduce-scatter (sum) of all gradients in one message.
    """
    return launch_all_gather(*tensors, dim=dim, mesh=mesh, layer=layer, reduction=reduction).wait()


def launch_all_gather(
    *tensors: torch.Tensor,
    dim: int,
    mesh: DeviceMesh | None,
    layer: str | None = None,
    reduction: GradientReduction = "exchange",
) -> PendingCollective:
    """Start `all_gather_sequence` and return at once.

    Args:
        *tensors, dim, mesh, layer, reduction: As in `all_gather_sequence`. The inputs may be freed or reused: a packed
            copy travels, except for a single tensor that lies sequence-first already, which must stay unchanged.

    Returns:
        The handle; its `wait()` yields the gathered tensors once.

    Backward: the exchange is launched where the forward waited and waited for where the forward launched.
    """
    packing = SequencePacking.of(tensors, dim)
    if group_of(mesh) is None or mesh is None:
        return PendingCollective(lambda: tensors, name="all_gather (one rank)")
    gather = _Gather(packing, tensors, mesh=mesh, layer=layer, reduction=reduction)
    token = _Launch.apply(gather, *tensors)
    return PendingCollective(lambda: _Wait.apply(gather, token), name=gather.name)


def flex_cp_allgather(
    k: torch.Tensor, v: torch.Tensor, *, cp_dim: int, cp_mesh: DeviceMesh | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather local keys and values to the global sequence.

    Args:
        k, v: `[B, N, L, D]` each (or any layout), sharded along `cp_dim`.
        cp_dim: The sequence dim; 2 for `[B, N, L, D]`.
        cp_mesh: 1-D context-parallel mesh; None or one rank returns `k, v`.

    Returns:
        `(K, V)`, S long in `cp_dim`.

    Backward: reduce-scatter (sum) of both gradients in one message.
    """
    global_k, global_v = all_gather_sequence(k, v, dim=cp_dim, mesh=cp_mesh)
    return global_k, global_v


class _Gather:
    """What the four moments of one gather share: launch and wait, forward and backward."""

    def __init__(
        self,
        packing: SequencePacking,
        tensors: Sequence[torch.Tensor],
        *,
        mesh: DeviceMesh,
        layer: str | None,
        reduction: GradientReduction,
    ) -> None:
        self.packing, self.mesh, self.layer, self.reduction = packing, mesh, layer, reduction
        self.needs_grad = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors)
        self.name = "all_gather"
        self._forward: Message | None = None
        self._backward: Message | None = None

    def launch(self, tensors: Sequence[torch.Tensor]) -> None:
        rows = self.packing.pack(tensors)
        gathered = rows.new_empty(self.mesh.size() * rows.shape[0], rows.shape[1])
        self._forward = Message("all_gather", gathered, rows, mesh=self.mesh, layer=self.layer, phase=forward_phase())
        self.name = describe(self._forward)

    def collect(self) -> tuple[torch.Tensor, ...]:
        message, self._forward = _taken(self._forward), None
        return self.packing.unpack(message.wait())

    def launch_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        wanted = [gradient for gradient, needed in zip(gradients, self.needs_grad, strict=True) if needed]
        rows = self.packing.select(self.needs_grad).pack(wanted)
        operation: Operation
        if self.reduction == "reduce_scatter":
            received = rows.new_empty(rows.shape[0] // self.mesh.size(), rows.shape[1])
            operation = "reduce_scatter"
        else:
            received = torch.empty_like(rows)
            operation = "all_to_all"
        self._backward = Message(operation, received, rows, mesh=self.mesh, layer=self.layer, phase="backward")

    def collect_gradients(self) -> tuple[torch.Tensor | None, ...]:
        message, self._backward = _taken(self._backward), None
        received = message.wait()
        if self.reduction == "exchange":
            received = _sum_shares(received, self.mesh.size())
        summed = iter(self.packing.select(self.needs_grad).unpack(received))
        return tuple(next(summed) if needed else None for needed in self.needs_grad)


def _sum_shares(received: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Sum the ranks' shares `[C * L, W]` to `[L, W]`, in fp32 or wider."""
    wide = torch.promote_types(received.dtype, torch.float32)
    shares = received.view(num_ranks, -1, received.shape[1])
    return shares.sum(0, dtype=wide).to(received.dtype)


def _taken(message: Message | None) -> Message:
    if message is None:
        raise AssertionError("a gather was collected before it was launched.")
    return message


class _Launch(torch.autograd.Function):
    """Launches in forward, collects the gradients in backward. The token ties it to `_Wait` in the graph."""

    @staticmethod
    def forward(ctx: Any, gather: _Gather, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gather = gather
        gather.launch(tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.gather.collect_gradients()


class _Wait(torch.autograd.Function):
    """Collects in forward, launches the exchange of gradients in backward."""

    @staticmethod
    def forward(ctx: Any, gather: _Gather, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gather = gather
        outputs = gather.collect()
        frozen = [output for output, needed in zip(outputs, gather.needs_grad, strict=True) if not needed]
        ctx.mark_non_differentiable(*frozen)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.gather.launch_gradients(gradients)
        return None, gradients[0].new_empty(0)
