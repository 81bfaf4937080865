"""The built-in wrappers, `<name>_cp_wrapper`, registered as `<name>`.

sdpa_hf   attention of transformers; keys and values gathered (Colossal)
"""

from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_core import AllGatherStrategy, ContextParallelStrategy

from ._attention_settings import refuse_unsupported
from ._boundaries import attention_shape
from ._boundary import AttentionBoundary, BoundaryForward, attach, boundary_of
from ._inner_wrapper import inner_wrapper

__all__ = ["sdpa_hf_cp_wrapper"]


@inner_wrapper(strategy=AllGatherStrategy, check=refuse_unsupported)
def sdpa_hf_cp_wrapper(
    target_module: torch.nn.Module,
    mesh: DeviceMesh | None,
    tp_mesh: DeviceMesh | None,
    cp_mesh: DeviceMesh | None,
    ep_mesh: DeviceMesh | None,
    *,
    backward_kv: Literal["saved", "regathered"] = "saved",
) -> BoundaryForward:
    """Give an attention of transformers all-gather context parallelism.

    Queries stay local `[B, N, L, D]`; keys and values are gathered `[B, Nkv, S, D]`, not expanded to N heads.

    Args:
        target_module: An attention module of a transformers model.
        mesh, tp_mesh, ep_mesh: Not used by this method.
        cp_mesh: 1-D mesh over which the sequence is sharded.
        backward_kv: `"saved"` keeps the gathered keys and values for backward; `"regathered"` gathers them once more.

    Returns:
        The replacement forward.

    Raises:
        UnsupportedError: If the module is not of transformers, or its config asks for what is not supported.
    """
    return _intercepted(target_module, AllGatherStrategy(backward_kv=backward_kv), cp_mesh)


def _intercepted(
    module: torch.nn.Module, strategy: ContextParallelStrategy, cp_mesh: DeviceMesh | None
) -> BoundaryForward:
    """Return the forward under which the module's attention call goes through the strategy."""
    boundary = boundary_of(module)
    if boundary is None:  # called by hand, outside apply_context_parallel
        boundary = AttentionBoundary(name=type(module).__name__, strategy=None, cp_mesh=cp_mesh)
        attach(module, boundary)
    if boundary.strategy is None:  # by hand, or from a wrapper of the user's own: nothing has been checked yet
        refuse_unsupported(module, boundary.name)
        strategy.validate(cp_mesh, attention_shape(module, boundary.name))
        boundary.strategy = strategy
    return BoundaryForward(module, boundary)
