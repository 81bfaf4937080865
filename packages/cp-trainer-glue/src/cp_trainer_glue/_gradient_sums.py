"""In words: how parameters are held, and over which ranks their gradients are summed."""

from collections.abc import Sequence

from ._config import AcceleratorConfig, FsdpConfig


def gradient_sums(accelerator: AcceleratorConfig, fsdp: FsdpConfig | None, *, partial: Sequence[str] = ()) -> str:
    """Return one line.

    Args:
        accelerator: Sizes of the axes.
        fsdp: How parameters are sharded; None where they are replicated.
        partial: Parameters of whose gradient each tensor-parallel rank finds a part.
    """
    parts = [_over_data(accelerator, fsdp)]
    if accelerator.tp_size > 1 and partial:
        names = partial[0] if len(partial) == 1 else f"{partial[0]} and {len(partial) - 1} more"
        parts.append(f"{names} also over tp ({accelerator.tp_size} ranks)")
    return "; ".join(parts)


def _over_data(accelerator: AcceleratorConfig, fsdp: FsdpConfig | None) -> str:
    replicas, shards = accelerator.dp_replicate_size, accelerator.dp_shard_size * accelerator.cp_size
    if fsdp is None:
        ranks = replicas * shards
        return f"parameters replicated, gradients summed over dp x cp ({ranks} ranks)" if ranks > 1 else "one data rank"
    dtype = fsdp.reduce_dtype or fsdp.param_dtype
    summed = f"gradients summed there{f' in {dtype}' if dtype else ''}"
    copies = f" and over dp_replicate ({replicas} replicas)" if replicas > 1 else ""
    return f"parameters sharded over dp_shard x cp ({shards} ranks, FSDP2), {summed}{copies}"
