"""The built-in wrappers, `<name>_cp_wrapper`, registered as `<name>`.

sdpa_hf    forward(hidden_states, ...): attention of transformers, or modules that call F.scaled_dot_product_attention;
           keys and values gathered (Colossal)
sdpa_qkv   forward(q, k, v, ...) that calls F.scaled_dot_product_attention; keys and values gathered (Colossal)
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_core import AllGatherStrategy, ContextParallelStrategy

from ._attention_settings import asks_config_for_attention
from ._boundary import AttentionBoundary, BoundaryForward, attach, boundary_of
from ._inner_wrapper import contract_of, inner_wrapper
from ._sdpa_forwards import Layout, QkvForward, SdpaForward
from ._sdpa_modules import check_hf, check_qkv, declared_heads, declared_shape, hf_shape, qkv_names

__all__ = ["sdpa_hf_cp_wrapper", "sdpa_qkv_cp_wrapper"]


def _all_gather(*, backward_kv: Literal["saved", "regathered"] = "saved", **_data: Any) -> AllGatherStrategy:
    return AllGatherStrategy(backward_kv=backward_kv)


@inner_wrapper(strategy=_all_gather, check=check_hf, shape=hf_shape)
def sdpa_hf_cp_wrapper(
    target_module: torch.nn.Module,
    mesh: DeviceMesh | None,
    tp_mesh: DeviceMesh | None,
    cp_mesh: DeviceMesh | None,
    ep_mesh: DeviceMesh | None,
    *,
    backward_kv: Literal["saved", "regathered"] = "saved",
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> BoundaryForward:
    """Give an attention `forward(hidden_states, ...)` all-gather context parallelism.

    Queries stay local `[B, N, L, D]`; keys and values are gathered `[B, Nkv, S, D]`: those of transformers not expanded
    to N heads, those of other modules as they give them to `F.scaled_dot_product_attention`.

    Args:
        target_module: An attention module of a transformers model, or a module whose forward calls
            `F.scaled_dot_product_attention` once.
        mesh, tp_mesh, ep_mesh: Not used by this method.
        cp_mesh: 1-D mesh over which the sequence is sharded.
        backward_kv: `"saved"` keeps the gathered keys and values for backward; `"regathered"` gathers them once more.
        num_q_heads, num_kv_heads, head_dim: Heads of the attention call of a module that is not of transformers, for
            costs and checks before the first forward; all three or none.

    Returns:
        The replacement forward.

    Raises:
        ContextParallelError: If the module has no such call, or its config asks for what is not supported.
    """
    data = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    boundary = _boundary_for(target_module, cp_mesh, sdpa_hf_cp_wrapper, {"backward_kv": backward_kv, **data})
    if asks_config_for_attention(target_module):
        return BoundaryForward(target_module, boundary)
    return SdpaForward(target_module, boundary, heads=declared_heads(boundary.name, **data))


@inner_wrapper(strategy=_all_gather, check=check_qkv, shape=declared_shape)
def sdpa_qkv_cp_wrapper(
    target_module: torch.nn.Module,
    mesh: DeviceMesh | None,
    tp_mesh: DeviceMesh | None,
    cp_mesh: DeviceMesh | None,
    ep_mesh: DeviceMesh | None,
    *,
    layout: Layout = "BNSD",
    arguments: Sequence[str] | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> BoundaryForward:
    """Give an attention `forward(q, k, v, ...)` all-gather context parallelism.

    Keys and values are gathered before the forward runs, with as many heads as they are given; inside, they have the
    global length S and queries the local length L.

    Args:
        target_module: A module whose forward calls `F.scaled_dot_product_attention` once, in `[B, N, L, D]`.
        mesh, tp_mesh, ep_mesh: Not used by this method.
        cp_mesh: 1-D mesh over which the sequence is sharded.
        layout: Of what the forward is given: `BNSD` (`[B, N, L, D]`) or `BSND` (`[B, L, N, D]`).
        arguments: Names of its queries, keys and values; left out, they are its first three arguments.
        num_q_heads, num_kv_heads, head_dim: Heads as the forward is given them, for costs and checks before the first
            forward; all three or none.

    Returns:
        The replacement forward.

    Raises:
        ContextParallelError: If the module has no such call or arguments.
    """
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    data = {"layout": layout, "arguments": arguments, **heads}
    boundary = _boundary_for(target_module, cp_mesh, sdpa_qkv_cp_wrapper, data)
    return QkvForward(
        target_module,
        boundary,
        names=qkv_names(target_module, boundary.name, arguments),
        layout=layout,
        heads=declared_heads(boundary.name, **heads),
    )


def _boundary_for(
    module: torch.nn.Module, cp_mesh: DeviceMesh | None, wrapper: Callable[..., Any], data: dict[str, Any]
) -> AttentionBoundary:
    """Return the boundary that lies on a module; whatever has not been checked yet is checked."""
    boundary = boundary_of(module)
    if boundary is None:  # called by hand, outside apply_context_parallel
        boundary = AttentionBoundary(name=type(module).__name__, strategy=None, cp_mesh=cp_mesh)
        attach(module, boundary)
    if boundary.strategy is None:  # by hand, or from a wrapper of the user's own
        boundary.strategy = _checked_strategy(module, boundary, wrapper, data)
    return boundary


def _checked_strategy(
    module: torch.nn.Module, boundary: AttentionBoundary, wrapper: Callable[..., Any], data: dict[str, Any]
) -> ContextParallelStrategy:
    contract = contract_of(wrapper)
    if contract is None or contract.strategy is None or contract.check is None or contract.shape is None:
        raise AssertionError(f"a built-in wrapper lacks its contract: {wrapper!r}.")
    strategy = contract.strategy(**data)
    contract.check(module, boundary.name, **data)
    shape = contract.shape(module, boundary.name, device=None, **data)
    if shape is not None:
        strategy.validate(boundary.cp_mesh, shape)
    return strategy
