"""Joining gradients over ranks in loops where no FSDP does it."""

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_collectives import InvalidInputError, UnsupportedError, all_reduce_sum, gather_objects, mesh_size

_BUCKET_BYTES = 64 * 2**20


def sum_gradients(params: Iterable[torch.nn.Parameter], dp_cp_mesh: DeviceMesh | None) -> None:
    """Sum each parameter's gradient over the data- and context-parallel ranks, in place.

    Call it once, after the last backward of a step; pair it with `mean_global_loss(..., grad_average_degree=1)`. A
    parameter that only some ranks used (an expert, say) counts as zero on the others; one that no rank used keeps None.

    Tensor-parallel parameters (`DTensor`) are summed shard by shard; a gradient that autograd left as a partial sum
    over their own mesh is summed there first, so that it is placed as its parameter.

    Args:
        params: The model's parameters, the same list on every rank.
        dp_cp_mesh: 1-D mesh; None or one rank leaves the gradients alone.

    Raises:
        InvalidInputError: If ranks pass different parameters, or one that is sharded over these ranks: FSDP has summed
            its gradient.
        UnsupportedError: If a gradient is sparse.
    """
    trainable = [param for param in dict.fromkeys(params) if param.requires_grad]  # tied ones may come twice
    for param in trainable:
        _place_as_parameter(param)
    if dp_cp_mesh is None or mesh_size(dp_cp_mesh) == 1:
        return
    _refuse_sharded(trainable, dp_cp_mesh)
    used = _used_anywhere(trainable, dp_cp_mesh)
    for param in used:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    for bucket in _buckets([_local(param.grad) for param in used if param.grad is not None]):
        all_reduce_sum(bucket, mesh=dp_cp_mesh)


def _place_as_parameter(param: torch.nn.Parameter) -> None:
    gradient = param.grad
    if isinstance(param, DTensor) and isinstance(gradient, DTensor) and gradient.placements != param.placements:
        param.grad = gradient.redistribute(placements=param.placements)


def _refuse_sharded(params: list[torch.nn.Parameter], dp_cp_mesh: DeviceMesh) -> None:
    ranks = set(dp_cp_mesh.mesh.flatten().tolist())
    for index, param in enumerate(params):
        if isinstance(param, DTensor) and len(ranks.intersection(_ranks_of(param.device_mesh))) > 1:
            raise InvalidInputError(
                f"sum_gradients: parameter {index} is a DTensor over the same ranks {sorted(ranks)} whose gradients "
                "are to be summed, so FSDP has summed its gradient; pass the other parameters only."
            )


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


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
