"""What a run says of itself before it starts."""

from collections.abc import Sequence

import torch

from ._config import AcceleratorConfig, TrainerConfig
from ._gradient_sums import gradient_sums


def run_summary(
    config: TrainerConfig,
    model: torch.nn.Module,
    methods: Sequence[tuple[str, str]],
    *,
    partial: Sequence[str],
    device_type: str,
    first: int,
) -> dict[str, str]:
    """Return rows of a name and a text.

    Args:
        config: The run.
        model: Its model.
        methods: The wrapper and the name of each wrapped attention.
        partial: Parameters of whose gradient each tensor-parallel rank finds a part.
        device_type: Where it runs.
        first: The step after which it goes on, 0 for a fresh start.
    """
    of_wrapper: dict[str, list[str]] = {}
    for wrapper, fqn in methods:
        of_wrapper.setdefault(wrapper, []).append(fqn)
    return {
        "ranks": f"{config.accelerator.world_size} ({_sizes(config.accelerator)}) on {device_type}",
        "model": f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        "methods": "; ".join(f"{name}: {_short(fqns)}" for name, fqns in of_wrapper.items()) or "none (cp_size 1)",
        "gradients": gradient_sums(config.accelerator, config.fsdp_config, partial=partial),
        "batch": f"{config.training.global_batch_size} x {config.data.seq_length} tokens",
        "output": config.output_dir,
        "start": f"after step {first}" if first else "from the beginning",
    }


def _sizes(axes: AcceleratorConfig) -> str:
    tensor_parallel = f" x tp {axes.tp_size}" if axes.tp_size > 1 else ""
    return f"dp {axes.dp_size} x cp {axes.cp_size}{tensor_parallel}"


def _short(fqns: list[str]) -> str:
    return fqns[0] if len(fqns) == 1 else f"{fqns[0]} ... {fqns[-1]} ({len(fqns)})"
