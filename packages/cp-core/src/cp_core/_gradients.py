"""Joining gradients over ranks in loops where no FSDP does it."""

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import InvalidInputError, UnsupportedError, all_reduce_sum, gather_objects, mesh_size

_BUCKET_BYTES = 64 * 2**20


def sum_gradients(params: Iterable[torch.nn.Parameter], dp_cp_mesh: DeviceMesh | None) -> None:
    """Sum each parameter's gradient over the data- and context-parallel ranks, in place.

    Call it once, after the last backward of a step; pair it with `mean_global_loss(..., grad_average_degree=1)`. A
    parameter that only some ranks used (an expert, say) counts as zero on the others; one that no rank used keeps None.

    Args:
        params: The model's parameters, the same list on every rank.
        dp_cp_mesh: 1-D mesh; None or one rank leaves the gradients alone.

    Raises:
        InvalidInputError: If ranks pass different parameters.
        UnsupportedError: If a gradient is sparse.
    """
    trainable = [param for param in dict.fromkeys(params) if param.requires_grad]  # tied ones may come twice
    if mesh_size(dp_cp_mesh) == 1:
        return
    used = _used_anywhere(trainable, dp_cp_mesh)
    for param in used:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    for bucket in _buckets([param.grad for param in used if param.grad is not None]):
        all_reduce_sum(bucket, mesh=dp_cp_mesh)


def clip_grad_norm(params: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients so that their total 2-norm is at most `max_norm`.

    For loops without FSDP: gradients must already be those of the whole batch (after `sum_gradients`), so every rank
    computes the same norm and no message is needed.

    Args:
        params: The model's parameters.
        max_norm: Upper bound of the norm; infinity measures without clipping.

    Returns:
        The norm before clipping, 0-d.
    """
    return torch.nn.utils.clip_grad_norm_(list(params), max_norm)


def _used_anywhere(params: list[torch.nn.Parameter], mesh: DeviceMesh | None) -> list[torch.nn.Parameter]:
    sparse = [index for index, param in enumerate(params) if param.grad is not None and param.grad.is_sparse]
    if sparse:
        raise UnsupportedError(f"sum_gradients: the gradient of parameter {sparse[0]} is sparse; use dense gradients.")
    masks = gather_objects([param.grad is not None for param in params], mesh=mesh)
    if len({len(mask) for mask in masks}) > 1:
        raise InvalidInputError(
            f"sum_gradients: ranks pass different numbers of trainable parameters ({[len(mask) for mask in masks]})."
        )
    return [param for param, *flags in zip(params, *masks, strict=True) if any(flags)]


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group gradients by dtype and device into messages of about `_BUCKET_BYTES`."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for same_kind in kinds.values():
        bucket: list[torch.Tensor] = []
        for gradient in same_kind:
            bucket.append(gradient)
            if sum(member.numel() * member.element_size() for member in bucket) >= _BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
