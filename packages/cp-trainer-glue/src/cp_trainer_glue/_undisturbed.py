"""A look at a model in the middle of its training that leaves no trace in it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from cp_collectives import check_no_pending, current_platform

from ._sharded_parameters import sharded_modules


@contextmanager
def undisturbed(model: torch.nn.Module, device: torch.device, *, where: str) -> Iterator[None]:
    """Context manager for forwards in eval mode and without gradients, after which training goes on as without them.

    Each module is back in the mode it had, the random generators in the state they had, and parameters that FSDP
    gathered are shards again.

    Args:
        model: The model in its last form.
        device: The device whose generator the forwards may draw from.
        where: What is done inside, for messages.

    Raises:
        LifecycleError: If a collective was launched inside and never waited for.
    """
    modes = {module: module.training for module in model.modules()}
    platform = current_platform(device)
    states, python_state, numpy_state = platform.rng_states(device), random.getstate(), np.random.get_state()
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: FSDP may keep what it gathers for the next forward
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for sharded in sharded_modules(model):
            sharded.reshard()
        platform.set_rng_states(states, device)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    check_no_pending(where=where)
