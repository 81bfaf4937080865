"""Wrapping the attentions of a model, all or none, and taking the wrappers off again."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import agree, mesh_size
from cp_core import ContextParallelError, ContextParallelStrategy, InvalidInputError, SequenceLayout

from ._boundary import AttentionBoundary, BoundaryForward, ForeignForward, attach, boundary_of, detach
from ._declaration import BoundaryPlan, MethodDeclaration, plan_boundaries
from ._registry import WrapperDeclaration

if TYPE_CHECKING:
    from ._transformers import Adoption

_logger = logging.getLogger("cp_wrappers")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryReport:
    """What one attention got, and by which declaration."""

    fqn: str
    wrapper: str
    match: str
    strategy: ContextParallelStrategy | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """The meshes that a wrapper is handed; None where the run has no such axis."""

    cp_mesh: DeviceMesh | None
    mesh: DeviceMesh | None = None
    tp_mesh: DeviceMesh | None = None
    ep_mesh: DeviceMesh | None = None


@dataclass(kw_only=True, slots=True)
class AppliedContextParallel:
    """A wrapped model; made by `apply_context_parallel`."""

    # One row per attention, in the model's order; empty at cp size 1.
    report: tuple[BoundaryReport, ...] = ()
    _modules: tuple[torch.nn.Module, ...] = ()
    # The forward that stood on each instance before, None where the class's own did.
    _earlier_forwards: tuple[object | None, ...] = ()
    _adoption: "Adoption | None" = field(default=None)

    @property
    def strategies(self) -> tuple[ContextParallelStrategy, ...]:
        """The distinct strategies in use; hand them to `shard_batch_for_cp`."""
        return tuple(dict.fromkeys(row.strategy for row in self.report if row.strategy is not None))

    def set_layout(self, layout: SequenceLayout) -> None:
        """Set the layout of the next forwards, for models that do not hand keyword arguments on to their attentions.

        Args:
            layout: The `cp_layout` of the batch.

        Raises:
            LifecycleError: If a forward under a different layout still awaits its backward.
        """
        for module in self._modules:
            boundary = boundary_of(module)
            if boundary is not None:
                boundary.set_layout(layout)

    def remove(self) -> None:
        """Give the model its own forwards and attention implementation back."""
        for module, earlier in zip(self._modules, self._earlier_forwards, strict=True):
            module.__dict__.pop("forward", None)
            if earlier is not None:
                module.__dict__["forward"] = earlier
            detach(module)
        if self._adoption is not None:
            self._adoption.restore()
        self.report, self._modules, self._earlier_forwards, self._adoption = (), (), (), None


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
    if mesh_size(cp_mesh) == 1:
        _logger.info("cp size 1: no attention is wrapped.")
        return AppliedContextParallel()
    plans, error = _try_plan(model, _as_sequence(declarations), cp_mesh)
    agree(error, mesh=cp_mesh)
    return install_boundaries(model, plans, meshes=meshes or Meshes(cp_mesh=cp_mesh))


def _as_sequence(
    declarations: Mapping[str, WrapperDeclaration] | Sequence[MethodDeclaration],
) -> Sequence[MethodDeclaration]:
    if isinstance(declarations, Mapping):
        return [MethodDeclaration(match=match, inner_wrapper=wrapper) for match, wrapper in declarations.items()]
    return declarations


def _try_plan(
    model: torch.nn.Module, declarations: Sequence[MethodDeclaration], cp_mesh: DeviceMesh | None
) -> tuple[list[BoundaryPlan], ContextParallelError | None]:
    try:
        plans = plan_boundaries(model, declarations, cp_mesh=cp_mesh)
    except ContextParallelError as error:
        return [], error
    return plans, None


def install_boundaries(
    model: torch.nn.Module, plans: Sequence[BoundaryPlan], *, meshes: Meshes
) -> AppliedContextParallel:
    """Wrap the attentions of a model by a plan that `plan_boundaries` made for it.

    Args:
        model: The planned model.
        plans: One plan per attention.
        meshes: What the wrappers are handed.

    Returns:
        The same handle as `apply_context_parallel`.
    """
    adoption = _adopt(model)
    earlier = (
        {}
        if adoption is None
        else {id(module): implementation for inner, implementation, _ in adoption.earlier for module in inner.modules()}
    )
    forwards = []
    for plan in plans:
        forwards.append(plan.module.__dict__.get("forward"))
        boundary = AttentionBoundary(name=plan.fqn, strategy=plan.strategy, cp_mesh=meshes.cp_mesh)
        boundary.earlier_implementation = earlier.get(id(plan.module))
        attach(plan.module, boundary)
        _wrap(plan, meshes)
    return AppliedContextParallel(
        report=tuple(
            BoundaryReport(fqn=plan.fqn, wrapper=plan.wrapper.name, match=plan.match, strategy=plan.strategy)
            for plan in plans
        ),
        _modules=tuple(plan.module for plan in plans),
        _earlier_forwards=tuple(forwards),
        _adoption=adoption,
    )


def _wrap(plan: BoundaryPlan, meshes: Meshes) -> None:
    before = plan.module.forward
    replacement = plan.wrapper.function(
        target_module=plan.module,
        mesh=meshes.mesh,
        tp_mesh=meshes.tp_mesh,
        cp_mesh=meshes.cp_mesh,
        ep_mesh=meshes.ep_mesh,
        **plan.wrapper.arguments,
    )
    if replacement is None:
        if plan.module.forward == before:
            raise InvalidInputError(
                f"{plan.fqn}: wrapper {plan.wrapper.name!r} returned None and left forward as it was; return a "
                "replacement, or set target_module.forward."
            )
        replacement = plan.module.forward
    if not isinstance(replacement, BoundaryForward):
        replacement = ForeignForward(plan.fqn, replacement)
    plan.module.__dict__["forward"] = replacement


def _adopt(model: torch.nn.Module) -> "Adoption | None":
    """Send transformers models through their seam; models of other kinds need none, and no transformers installed."""
    if not any(hasattr(getattr(module, "config", None), "_attn_implementation") for module in model.modules()):
        return None
    from ._transformers import adopt

    adoption = adopt(model)
    if any(use_cache for _, _, use_cache in adoption.earlier):
        _logger.info("config.use_cache was True and is now False: key/value caches are for inference.")
    return adoption
