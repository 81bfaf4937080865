"""From specs to the plan of one model. It finds attentions; it never chooses a method."""

from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_core import ContextParallelError, InvalidInputError, UnsupportedError
from cp_wrappers import MethodDeclaration, plan_boundaries

from ._plan import ModuleShardingSpec, ShardingPlan


class ShardingPlanner:
    """Makes a plan from the user's specs.

    Args:
        plan_overrides: fnmatch pattern of module names -> what is declared for them.
    """

    def __init__(self, plan_overrides: Mapping[str, ModuleShardingSpec]) -> None:
        self._specs = dict(plan_overrides)

    def plan(
        self,
        model: torch.nn.Module,
        device_mesh: DeviceMesh,
        *,
        tp_size: int = 1,
        cp_size: int = 1,
        ep_size: int = 1,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
    ) -> ShardingPlan:
        """Check the specs against a model and return what each attention will get; the model is not touched.

        Args:
            model: The model, not yet wrapped.
            device_mesh: A mesh with an axis `cp` when `cp_size` is above 1.
            tp_size, ep_size, sequence_parallel, loss_parallel: The other parallelisms; only 1 and False in this
                version.
            cp_size: Ranks over which the sequence is sharded.

        Raises:
            InvalidInputError: With all faults of the declarations together.
            UnsupportedError: For a parallelism that this version does not have.
        """
        _refuse_other_parallelism(
            {"tp_size": tp_size, "ep_size": ep_size},
            {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel},
        )
        if cp_size == 1:
            return ShardingPlan(module_specs=self._specs)
        cp_mesh = cp_axis(device_mesh, cp_size)
        faults = [fault for match, spec in self._specs.items() if (fault := _spec_fault(match, spec)) is not None]
        declarations = [
            MethodDeclaration(match=match, inner_target=spec.inner_target, inner_wrapper=spec.inner_wrapper)
            for match, spec in self._specs.items()
            if spec.inner_wrapper is not None
        ]
        try:
            boundaries = plan_boundaries(model, declarations, cp_mesh=cp_mesh)
        except ContextParallelError as error:
            if not faults:
                raise
            raise InvalidInputError("\n".join([*faults, str(error)])) from error
        if faults:
            raise InvalidInputError("\n".join(faults))
        return ShardingPlan(module_specs=self._specs, boundaries=tuple(boundaries), cp_size=cp_size)


def cp_axis(device_mesh: DeviceMesh, cp_size: int) -> DeviceMesh:
    """Return the 1-D `cp` mesh of a device mesh.

    Raises:
        InvalidInputError: If there is no such axis, or it has another size.
    """
    names = device_mesh.mesh_dim_names or ()
    if "cp" not in names:
        raise InvalidInputError(f"cp_size is {cp_size}, but the device mesh has no axis 'cp', only {', '.join(names)}.")
    cp_mesh = device_mesh["cp"]
    if cp_mesh.size() != cp_size:
        raise InvalidInputError(f"cp_size is {cp_size}, but axis 'cp' of the device mesh has {cp_mesh.size()} ranks.")
    return cp_mesh


def _spec_fault(match: str, spec: ModuleShardingSpec) -> str | None:
    if spec.inner_wrapper is not None and spec.local_compute_fn is not None:
        return f"plan_overrides {match!r} declares both inner_wrapper and local_compute_fn; keep one of them."
    if spec.local_compute_fn is not None:
        return f"plan_overrides {match!r}: local_compute_fn is not supported in this version; declare an inner_wrapper."
    if spec.inner_wrapper is None:
        return f"plan_overrides {match!r} names no method; add inner_wrapper, for example inner_wrapper: sdpa_hf."
    if spec.region_dispatch is not False:
        return (
            f"plan_overrides {match!r} needs region_dispatch: false, but has {spec.region_dispatch}: the wrapper "
            "communicates by itself, and a declarative boundary around it would do so again."
        )
    return None


def _refuse_other_parallelism(sizes: Mapping[str, int], switches: Mapping[str, bool]) -> None:
    asked = [f"{name} {size}" for name, size in sizes.items() if size != 1]
    asked += [name for name, on in switches.items() if on]
    if asked:
        raise UnsupportedError(f"{', '.join(asked)}: not supported in this version of cp-trainer-glue; leave it off.")
