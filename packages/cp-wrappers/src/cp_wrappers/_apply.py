"""`apply_context_parallel`: declared, checked and applied in one call."""

import ast
import logging
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import agree, mesh_size
from cp_core import ContextParallelError, InvalidInputError

from ._check import check_declarations
from ._declaration import BoundaryPlan, MethodDeclaration
from ._faults import Fault, raise_faults
from ._install import AppliedContextParallel, Meshes, install_boundaries, unwrapped
from ._registry import WrapperDeclaration
from ._suggestion import Suggestion, suggest_declarations
from ._targets import fault_in

_logger = logging.getLogger("cp_wrappers")


def apply_context_parallel(
    model: torch.nn.Module,
    cp_mesh: DeviceMesh | None,
    declarations: Mapping[str, WrapperDeclaration] | Sequence[MethodDeclaration],
    *,
    meshes: Meshes | None = None,
) -> AppliedContextParallel:
    """Give every attention of a model its declared context-parallel method.

    All checks run before any module changes, on all ranks alike; a fault on one rank stops all.

    Args:
        model: The model, before activation checkpointing, compile and FSDP.
        cp_mesh: 1-D mesh over which the sequence is sharded. None or one rank: nothing is wrapped.
        declarations: `{pattern: wrapper}`: fnmatch on full module names, and a registered name, a mapping with
            `_target_` and named data, or a decorated function. Or a sequence of `MethodDeclaration`.
        meshes: The other meshes for wrappers that ask for them.

    Returns:
        A handle with `.report`, `.strategies`, `.set_layout(layout)` and `.remove()`.

    Raises:
        InvalidInputError: With every fault of the declarations together.

    Example:
        >>> applied = apply_context_parallel(model, cp_mesh, {"*.self_attn": "sdpa_hf"})
        >>> batch = shard_batch_for_cp(global_batch, cp_mesh, strategy=applied.strategies)
    """
    if cp_mesh is not None and not isinstance(cp_mesh, DeviceMesh):
        raise InvalidInputError(f"cp_mesh must be a 1-D DeviceMesh or None, but is {cp_mesh!r}.")
    if mesh_size(cp_mesh) == 1:
        _logger.info("cp size 1: no attention is wrapped.")
        return unwrapped(model, cp_mesh)
    plans: tuple[BoundaryPlan, ...] = ()

    def make_plan() -> None:
        nonlocal plans
        plans = _checked_plans(model, declarations, cp_size=mesh_size(cp_mesh))
        if meshes is not None and meshes.cp_mesh is not cp_mesh:
            raise InvalidInputError("meshes.cp_mesh must be the cp_mesh that is given beside it.")

    agree(fault_in(make_plan), mesh=cp_mesh)
    return install_boundaries(model, plans, meshes=meshes or Meshes(cp_mesh=cp_mesh))


def _checked_plans(
    model: torch.nn.Module,
    declarations: Mapping[str, WrapperDeclaration] | Sequence[MethodDeclaration],
    *,
    cp_size: int,
) -> tuple[BoundaryPlan, ...]:
    declared, faults = _as_sequence(declarations)
    check = check_declarations(model, declared, cp_size=cp_size)
    try:
        raise_faults([*faults, *check.faults])
    except ContextParallelError as error:
        suggested = suggest_declarations(model, declared, cp_size=cp_size)
        text = None if suggested is None else _as_python(suggested, as_mapping=isinstance(declarations, Mapping))
        if suggested is None or text is None:
            raise
        raise type(error)(f"{error}\n{suggested.heading}:\n{text}") from None
    return check.plans


def _as_sequence(
    declarations: Mapping[str, WrapperDeclaration] | Sequence[MethodDeclaration],
) -> tuple[list[MethodDeclaration], list[Fault]]:
    if isinstance(declarations, Mapping):
        declared, faults = [], []
        for match, wrapper in declarations.items():
            try:
                declared.append(MethodDeclaration(match=match, inner_wrapper=wrapper))
            except ContextParallelError as error:
                faults.append(Fault(message=str(error)))
        return declared, faults
    if not isinstance(declarations, Sequence) or not all(isinstance(d, MethodDeclaration) for d in declarations):
        raise InvalidInputError(
            "declarations must be {pattern: wrapper} or a sequence of MethodDeclaration, but got "
            f"{type(declarations).__name__}."
        )
    return list(declarations), []


def _as_python(suggested: Suggestion, *, as_mapping: bool) -> str | None:
    """Return declarations as a user would write them; None if one holds what has no name or literal."""
    declarations = suggested.declarations
    try:
        if as_mapping and all(declaration.local_compute_fn is None for declaration in declarations):
            rows = [f"    {d.match!r}: {_written(d.inner_wrapper)}," for d in declarations]
            return "\n".join(["{", *rows, "}"])
        return "\n".join(["[", *map(_written_declaration, declarations), "]"])
    except ValueError:
        return None


def _written_declaration(declaration: MethodDeclaration) -> str:
    names = ("match", "inner_target", "inner_wrapper", "local_compute_fn")
    values = {name: getattr(declaration, name) for name in names}
    fields = ", ".join(f"{name}={_written(value)}" for name, value in values.items() if value is not None)
    return f"    MethodDeclaration({fields}),"


def _written(value: object) -> str:
    """Return a function by its name, anything else as a literal; ValueError for what has neither."""
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and name.isidentifier():
        return name
    literal = repr(value)
    ast.literal_eval(literal)
    return literal
