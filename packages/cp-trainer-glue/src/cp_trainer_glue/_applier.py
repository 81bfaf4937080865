"""Putting a plan into effect, with exactly the wrappers that the user declared."""

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_core import InvalidInputError
from cp_wrappers import AppliedContextParallel, Meshes, install_boundaries

from ._plan import ShardingPlan
from ._planner import ShardingPlanner, mesh_axis
from ._resolver import PlanOverrideResolver
from ._tensor_parallel import TpGradInfo, apply_tensor_parallel
from ._validation import Validation

if TYPE_CHECKING:
    from ._config import TrainerConfig
    from ._mesh import MeshContext


ShardingMode = Literal["production", "validate"]


class AppliedSharding(NamedTuple):
    """A model to which a plan was applied."""

    context_parallel: AppliedContextParallel
    # Parameters whose gradient needs a sum over tensor-parallel ranks, once per step, with the group.
    tp_grad_info: TpGradInfo
    # What watches the boundaries; None in production.
    validation: Validation | None = None


class ShardingApplier:
    """Applies a plan to its model.

    Args:
        plan: What `ShardingPlanner.plan` returned.
        device_mesh: The mesh it was planned for; None is enough at cp size 1.
        sharding_mode: `production` runs local tensors straight through; `validate` carries DTensors across each
            boundary and checks the declared placements, with equal outputs and gradients.

    Raises:
        InvalidInputError: If the mode is another one, or there is no mesh to validate on.
    """

    def __init__(
        self, plan: ShardingPlan, device_mesh: DeviceMesh | None, *, sharding_mode: ShardingMode = "production"
    ) -> None:
        if sharding_mode not in ("production", "validate"):
            raise InvalidInputError(f"sharding_mode must be production or validate, but is {sharding_mode!r}.")
        if sharding_mode == "validate" and device_mesh is None:
            raise InvalidInputError("sharding_mode validate looks at tensors on a device mesh, but got none.")
        self._plan, self._device_mesh, self._mode = plan, device_mesh, sharding_mode
        # What watches the boundaries after `apply`; None in production.
        self.validation: Validation | None = None

    def split(self, model: torch.nn.Module) -> TpGradInfo:
        """Split layers over tensor-parallel ranks, in place and for good; before `apply`.

        Every rank has the whole model before, with equal weights. Without tensor parallelism nothing is done.

        Args:
            model: The planned model.

        Returns:
            The parameters whose gradient needs a sum over tensor-parallel ranks once per step, with the group.
        """
        return apply_tensor_parallel(model, self._plan.tensor_parallel, self._tp_mesh())

    def apply(self, model: torch.nn.Module) -> AppliedContextParallel:
        """Wrap every attention by its declaration; at cp size 1 only those with a method of the user's own.

        Every rank of the mesh calls it; all attentions are wrapped on all ranks, or none.

        Args:
            model: The planned model, split, not yet wrapped.

        Returns:
            A handle with `.report`, `.strategies` and `.remove()`.
        """
        meshes = Meshes(cp_mesh=self._cp_mesh(), mesh=self._device_mesh, tp_mesh=self._tp_mesh())
        applied = install_boundaries(model, self._plan.boundaries, meshes=meshes)
        if self._mode == "validate" and self._device_mesh is not None:
            self.validation = Validation(device_mesh=self._device_mesh)
            for plan in self._plan.boundaries:
                self.validation.watch(plan.fqn, plan.module, self._plan.placements[plan.fqn])
        return applied

    def _cp_mesh(self) -> DeviceMesh | None:
        names = () if self._device_mesh is None else self._device_mesh.mesh_dim_names or ()
        if self._plan.cp_size == 1 and "cp" not in names:
            return None
        return mesh_axis(self._device_mesh, "cp", self._plan.cp_size)

    def _tp_mesh(self) -> DeviceMesh | None:
        plan = self._plan.tensor_parallel
        return None if plan is None else mesh_axis(self._device_mesh, "tp", plan.tp_size)


def apply_sharding_plan(
    model: torch.nn.Module,
    plan: ShardingPlan,
    device_mesh: DeviceMesh | None,
    *,
    sharding_mode: ShardingMode = "production",
) -> tuple[torch.nn.Module, TpGradInfo]:
    """Apply a plan and return the model with what tensor parallelism adds to the gradient step.

    Args:
        model: The model that was planned, not yet wrapped.
        plan: Its plan.
        device_mesh: The mesh it was planned for.
        sharding_mode: As for `ShardingApplier`.

    Returns:
        `(model, tp_grad_info)`: the same model, split and wrapped, and the parameters that each tensor-parallel rank
        has whole and of whose gradient it finds a part, such as q/k norms: sum it over their group, once per step. None
        without tensor parallelism.
    """
    return model, _applied(model, plan, device_mesh, sharding_mode).tp_grad_info


def _applied(
    model: torch.nn.Module, plan: ShardingPlan, device_mesh: DeviceMesh | None, sharding_mode: ShardingMode
) -> AppliedSharding:
    applier = ShardingApplier(plan, device_mesh, sharding_mode=sharding_mode)
    tp_grad_info = applier.split(model)
    context_parallel = applier.apply(model)
    return AppliedSharding(context_parallel=context_parallel, tp_grad_info=tp_grad_info, validation=applier.validation)


def apply_plan(model: torch.nn.Module, config: "TrainerConfig", mesh_context: "MeshContext") -> AppliedSharding:
    """Resolve, plan and apply a trainer's `plan_overrides`.

    Args:
        model: The trainer's model, not yet wrapped.
        config: The trainer's config.
        mesh_context: Its meshes.

    Returns:
        The handle of context parallelism, its `.report` and `.strategies` empty at cp size 1, and what tensor
        parallelism adds to the gradient step.

    Raises:
        ContextParallelError: With all faults together, on all ranks, before any module changes.
    """
    plan = _plan_of(model, config, mesh_context)
    return _applied(model, plan, mesh_context.device_mesh, config.sharding_mode)


def _plan_of(model: torch.nn.Module, config: "TrainerConfig", mesh_context: "MeshContext") -> ShardingPlan:
    accelerator = config.accelerator
    specs = PlanOverrideResolver(config.plan_overrides).resolve(cp_size=accelerator.cp_size)
    return ShardingPlanner(specs).plan(
        model,
        mesh_context.device_mesh,
        tp_size=accelerator.tp_size,
        cp_size=accelerator.cp_size,
        ep_size=accelerator.ep_size,
        sequence_parallel=accelerator.sequence_parallel,
        loss_parallel=accelerator.loss_parallel,
    )
