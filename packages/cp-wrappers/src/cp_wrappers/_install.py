"""Putting a plan into effect, all of it or nothing, and taking it off again."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from cp_collectives import agree, gather_objects, mesh_size
from cp_core import (
    ContextParallelError,
    ContextParallelStrategy,
    InvalidInputError,
    LifecycleError,
    SequenceLayout,
    shard_batch_for_cp,
)

from ._boundaries import model_specs_in
from ._boundary import AttentionBoundary, BoundaryForward, ForeignForward, attach, boundary_of, restore_forward
from ._declaration import BoundaryPlan
from ._entries import watch_entries
from ._model_spec import BatchPrepare
from ._one_rank import OneRank
from ._registry import plain
from ._targets import FOREIGN_FAILURES, failure_in, fault_in

if TYPE_CHECKING:
    from ._transformers import Adoption

_logger = logging.getLogger("cp_wrappers")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryReport:
    """What one attention got, and by which declaration."""

    fqn: str
    wrapper: str
    match: str
    # None for a method with communication of its own.
    strategy: ContextParallelStrategy | None
    # Where the declaration stands, for example "plan_overrides.0"; empty outside a config.
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """The meshes that a wrapper is handed; None where the run has no such axis."""

    cp_mesh: DeviceMesh | None
    mesh: DeviceMesh | None = None
    tp_mesh: DeviceMesh | None = None
    ep_mesh: DeviceMesh | None = None


class _Touched(NamedTuple):
    """A module that was touched."""

    module: torch.nn.Module
    # The forward that stood on the instance before, None where the class's own did.
    earlier: object | None
    # The forward that stands on it now; None where only a boundary was laid on it.
    installed: object | None


@dataclass(kw_only=True, slots=True)
class AppliedContextParallel:
    """A wrapped model; made by `apply_context_parallel`."""

    # One row per attention, in the model's order; empty where nothing was wrapped.
    report: tuple[BoundaryReport, ...] = ()
    _cp_mesh: DeviceMesh | None = None
    _batch_prepare_fns: tuple[BatchPrepare, ...] = ()
    _touched: list[_Touched] = field(default_factory=list)
    _adoption: "Adoption | None" = None
    # At cp size 1.
    _one_rank: OneRank | None = None
    _hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def strategies(self) -> tuple[ContextParallelStrategy, ...]:
        """The distinct strategies in use; hand them to `shard_batch_for_cp`."""
        return tuple(dict.fromkeys(row.strategy for row in self.report if row.strategy is not None))

    def shard_batch(self, batch: Mapping[str, Any], *, multiple_of: int = 1) -> dict[str, Any]:
        """Return this rank's shard of a global batch, padded by the rules of all methods in use.

        What the model's spec prepares (`register_cp_model_spec`) is prepared first.

        Args:
            batch: As for `shard_batch_for_cp`.
            multiple_of: A further multiple of the padded length.

        Returns:
            As `shard_batch_for_cp`.

        Raises:
            ContextParallelError: As `shard_batch_for_cp`; or if preparing failed on one rank, on all.
        """
        if self._batch_prepare_fns:
            batch = _prepared(batch, self._batch_prepare_fns, self._cp_mesh)
        return shard_batch_for_cp(batch, self._cp_mesh, strategy=self.strategies, multiple_of=multiple_of)

    def set_layout(self, layout: SequenceLayout) -> None:
        """Set the layout of the next forwards, for models that do not hand keyword arguments on to their attentions.

        A wrapper of your own is handed it as `cp_layout`, if its forward takes that.

        Args:
            layout: The `cp_layout` of the batch.

        Raises:
            LifecycleError: If a forward under a different layout still awaits its backward; nothing is set then.
            InvalidInputError: At cp size 1, if the layout has pads that nothing would hide from an attention.
        """
        if self._one_rank is not None:
            self._one_rank.set_layout(layout)
        found = (boundary_of(touched.module) for touched in self._touched)
        boundaries = [boundary for boundary in found if boundary is not None]
        for boundary in boundaries:
            boundary.check_layout(layout)
        for boundary in boundaries:
            boundary.set_layout(layout)

    def remove(self) -> None:
        """Give the model its own forwards and configs back.

        Raises:
            LifecycleError: If something else replaced a wrapped forward since; nothing is removed then.
        """
        for module, _, installed in self._touched:
            if installed is not None and module.__dict__.get("forward") is not installed:
                raise LifecycleError(
                    f"the forward of a {type(module).__name__} was replaced after it was wrapped; take that off first, "
                    "then call remove()."
                )
        self._undo()

    def _undo(self) -> None:
        for module, earlier, _ in reversed(self._touched):
            restore_forward(module, earlier)
        if self._adoption is not None:
            self._adoption.restore()
        for hook in self._hooks:
            hook.remove()
        if self._one_rank is not None:
            self._one_rank.remove()
        self.report, self._touched, self._adoption, self._batch_prepare_fns = (), [], None, ()
        self._one_rank, self._hooks = None, []


def unwrapped(model: torch.nn.Module, cp_mesh: DeviceMesh | None) -> AppliedContextParallel:
    """Return the handle of a model in which nothing is wrapped; it still prepares batches."""
    specs = model_specs_in(model)
    functions = dict.fromkeys(spec.batch_prepare_fn for spec in specs if spec.batch_prepare_fn is not None)
    one_rank = OneRank(model) if mesh_size(cp_mesh) == 1 else None
    return AppliedContextParallel(_cp_mesh=cp_mesh, _batch_prepare_fns=tuple(functions), _one_rank=one_rank)


def install_boundaries(
    model: torch.nn.Module, plans: Sequence[BoundaryPlan], *, meshes: Meshes
) -> AppliedContextParallel:
    """Wrap the attentions of a model by a plan that `plan_boundaries` made for it: all of them, or none.

    Args:
        model: The planned model.
        plans: One plan per attention.
        meshes: What the wrappers are handed; every rank of `cp_mesh` calls this.

    Returns:
        The same handle as `apply_context_parallel`.

    Raises:
        ContextParallelError: On all ranks, if a wrapper failed on one; the model is as it was.
    """
    applied = unwrapped(model, meshes.cp_mesh)
    agree(fault_in(lambda: _require_plans_of(model, plans)), mesh=meshes.cp_mesh)
    _require_equal_plans(plans, meshes.cp_mesh)
    fault = fault_in(lambda: _install(model, plans, meshes, applied))
    try:
        agree(fault, mesh=meshes.cp_mesh)
    except ContextParallelError:
        applied._undo()
        raise
    return applied


def _prepared(
    batch: Mapping[str, Any], functions: Sequence[BatchPrepare], cp_mesh: DeviceMesh | None
) -> Mapping[str, Any]:
    def prepare_all() -> None:
        nonlocal batch
        for prepare in functions:
            prepared = prepare(batch)
            if not isinstance(prepared, Mapping):
                raise InvalidInputError(
                    f"batch_prepare_fn {getattr(prepare, '__name__', prepare)} must return the completed batch, a "
                    f"mapping, but returned {type(prepared).__name__}."
                )
            batch = prepared

    agree(fault_in(prepare_all, what="preparing the batch failed"), mesh=cp_mesh)
    return batch


def _require_plans_of(model: torch.nn.Module, plans: Sequence[BoundaryPlan]) -> None:
    own = {id(module) for module in model.modules()}
    foreign = [plan.fqn for plan in plans if id(plan.module) not in own]
    if foreign:
        raise InvalidInputError(
            f"the plan of {foreign[0]} was made for another model than this {type(model).__name__}; plan each model."
        )


def _require_equal_plans(plans: Sequence[BoundaryPlan], cp_mesh: DeviceMesh | None) -> None:
    """Refuse ranks that would run different methods: they would wait for each other's messages."""
    rows = {plan.fqn: f"{plan.wrapper.name} {plain(plan.wrapper.arguments)}" for plan in plans}
    first, *others = gather_objects(rows, mesh=cp_mesh)
    for rank, other in enumerate(others, start=1):
        differing = [fqn for fqn in first | other if first.get(fqn) != other.get(fqn)]
        if differing:
            fqn = differing[0]
            raise InvalidInputError(
                f"all ranks must declare the same methods, but for {fqn} rank 0 has {first.get(fqn, 'none')} and rank "
                f"{rank} has {other.get(fqn, 'none')}."
            )


def _install(
    model: torch.nn.Module, plans: Sequence[BoundaryPlan], meshes: Meshes, applied: AppliedContextParallel
) -> None:
    for plan in plans:  # before any wrapper runs: it may make groups, which all ranks must do in one order
        if plan.strategy is not None and plan.shape is not None:
            plan.strategy.validate(meshes.cp_mesh, plan.shape)
    applied._adoption = _adopt(model) if mesh_size(meshes.cp_mesh) > 1 else None
    earlier = {} if applied._adoption is None else applied._adoption.earlier_implementations()
    rows = []
    for plan in plans:
        boundary = AttentionBoundary(name=plan.fqn, strategy=plan.strategy, cp_mesh=meshes.cp_mesh)
        # The seam of transformers asks the module that attends, which may be another than the wrapped one.
        for module in plan.attentions:
            boundary.earlier_implementation = earlier.get(id(module))
            if module is not plan.module:
                attach(module, boundary)
                applied._touched.append(_Touched(module, module.__dict__.get("forward"), None))
        attach(plan.module, boundary)
        before = plan.module.__dict__.get("forward")
        applied._touched.append(_Touched(plan.module, before, None))  # a wrapper may replace it, and fail then
        forward = plan.module.__dict__["forward"] = _replacement(plan, boundary, meshes)
        applied._touched[-1] = _Touched(plan.module, before, forward)
        rows.append(_report_row(plan, boundary))
    if applied._adoption is not None:
        applied._hooks = watch_entries(model, [plan.module for plan in plans if plan.strategy is not None])
    applied.report = tuple(rows)


def _report_row(plan: BoundaryPlan, boundary: AttentionBoundary) -> BoundaryReport:
    return BoundaryReport(
        fqn=plan.fqn,
        wrapper=plan.wrapper.name,
        match=plan.match,
        strategy=boundary.strategy,  # a wrapper of the user's own may have called one of ours
        source=plan.declaration.source,
    )


def _replacement(plan: BoundaryPlan, boundary: AttentionBoundary, meshes: Meshes) -> BoundaryForward | ForeignForward:
    before = plan.module.forward
    made = _call_wrapper(plan, meshes)
    name, channel = plan.wrapper.name, plan.wrapper.channel
    if made is None and channel == "local_compute_fn":
        raise InvalidInputError(
            f"{plan.fqn}: local_compute_fn {name!r} returned None; return the callable that computes on local tensors."
        )
    if made is None:
        made = plan.module.forward
        if made == before:
            raise InvalidInputError(
                f"{plan.fqn}: wrapper {name!r} returned None and left forward as it was; return a replacement, or set "
                "target_module.forward."
            )
    if made is plan.module or (made == before and channel == "inner_wrapper"):
        found = "the module itself" if made is plan.module else "target_module.forward as it was"
        raise InvalidInputError(
            f"{plan.fqn}: {channel} {name!r} returned {found}; return a replacement for its forward, which may call "
            "the forward that target_module had before."
        )
    if not callable(made):
        raise InvalidInputError(
            f"{plan.fqn}: {channel} {name!r} must return a replacement for forward, but returned {type(made).__name__}."
        )
    return made if isinstance(made, BoundaryForward) else ForeignForward(boundary, made)


def _call_wrapper(plan: BoundaryPlan, meshes: Meshes) -> Any:
    try:
        return plan.wrapper.function(
            target_module=plan.module,
            mesh=meshes.mesh,
            tp_mesh=meshes.tp_mesh,
            cp_mesh=meshes.cp_mesh,
            ep_mesh=meshes.ep_mesh,
            **plan.wrapper.arguments,
        )
    except ContextParallelError:
        raise
    except FOREIGN_FAILURES as error:  # a user's code: all ranks stop with its words
        raise InvalidInputError(
            f"{plan.fqn}: {plan.wrapper.channel} {plan.wrapper.name!r} failed: {failure_in(error)}"
        ) from error


def _adopt(model: torch.nn.Module) -> "Adoption | None":
    """Send transformers models through their seam; models of other kinds need none, and no transformers installed."""
    if not any(hasattr(getattr(module, "config", None), "_attn_implementation") for module in model.modules()):
        return None
    from ._transformers import adopt  # lazily: cp-wrappers works without transformers

    adoption = adopt(model)
    if adoption.had_cache:
        _logger.info("config.use_cache was True and is now False: key/value caches are for inference.")
    return adoption
