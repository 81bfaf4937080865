"""What the parameters of a model take on a rank; needs no ranks."""

import torch

from ._tensor_parallel_plan import TensorParallelPlan, split_of


def parameter_bytes(model: torch.nn.Module, plan: TensorParallelPlan | None, *, num_shards: int) -> int:
    """Return the bytes of the parameters that a rank holds between steps; the first rank, which has the larger parts.

    Args:
        model: The whole model; it may be on the meta device.
        plan: How tensor parallelism splits it; None leaves it whole.
        num_shards: Ranks over which FSDP shards the rest of each parameter along its first dim; 1 without.
    """
    total = 0
    for name, parameter in model.named_parameters():
        sizes = list(parameter.shape)
        split = None if plan is None else split_of(parameter, plan.styles.get(name, ""))
        if plan is not None and split is not None:
            sizes[split.dim] = -(-sizes[split.dim] // plan.tp_size)
        if sizes:
            sizes[0] = -(-sizes[0] // num_shards)
        total += torch.Size(sizes).numel() * parameter.itemsize
    return total
