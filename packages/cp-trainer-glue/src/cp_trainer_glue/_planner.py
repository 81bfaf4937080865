"""From specs to the plan of one model. It finds attentions; it never chooses a method."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import agree
from cp_core import ContextParallelError, InvalidInputError, UnsupportedError
from cp_wrappers import (
    BoundaryPlan,
    Fault,
    MethodDeclaration,
    Suggestion,
    check_declarations,
    check_methods,
    suggest_declarations,
)

from ._plan import ModuleShardingSpec, ResolvedOverride, ShardingPlan, as_yaml, entries_of
from ._tensor_parallel_plan import TensorParallelCheck, TensorParallelPlan, check_tensor_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCheck:
    """What the specs come to on a model."""

    boundaries: tuple[BoundaryPlan, ...]
    faults: tuple[Fault, ...]
    # What fits the model, where there are faults and something does.
    suggestion: Suggestion | None = None
    # None without tensor parallelism, and where it has faults.
    tensor_parallel: TensorParallelPlan | None = None


class ShardingPlanner:
    """Makes a plan from the user's specs.

    Args:
        plan_overrides: fnmatch pattern of module names -> what is declared for them; or what `PlanOverrideResolver`
            returns.
    """

    def __init__(self, plan_overrides: Mapping[str, ModuleShardingSpec] | Sequence[ResolvedOverride]) -> None:
        self._overrides = (
            tuple(_override(match, spec) for match, spec in plan_overrides.items())
            if isinstance(plan_overrides, Mapping)
            else tuple(plan_overrides)
        )

    def plan(
        self,
        model: torch.nn.Module,
        device_mesh: DeviceMesh | None,
        *,
        tp_size: int = 1,
        cp_size: int = 1,
        ep_size: int = 1,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
    ) -> ShardingPlan:
        """Check the specs against a model and return what each attention will get; the model is not touched.

        Every rank of the mesh calls it, and a fault on one stops all.

        Args:
            model: The model, not yet wrapped.
            device_mesh: A mesh with axes `cp` and `tp`; one of size 1 may be absent, and None is enough where both are.
            tp_size: Ranks over which layers are split by transformers' own plan.
            ep_size: Only 1 in this version.
            sequence_parallel: Whether activations between the split layers are sharded over `tp` along the sequence.
            loss_parallel: Whether the model's logits stay sharded over `tp` along the vocabulary.
            cp_size: Ranks over which the sequence is sharded. At 1 only methods without a strategy of ours are planned:
                the others would be identities.

        Raises:
            InvalidInputError: With all faults of the declarations together.
            UnsupportedError: For a parallelism that this version does not have.
        """
        check: PlanCheck | None = None
        fault: ContextParallelError | None = None
        try:
            _refuse_other_parallelism({"ep_size": ep_size})
            _check_size(device_mesh, "cp", cp_size)
            _check_size(device_mesh, "tp", tp_size)
            check = self.check(
                model,
                cp_size=cp_size,
                tp_size=tp_size,
                sequence_parallel=sequence_parallel,
                loss_parallel=loss_parallel,
            )
            fault = plan_error(check) if check.faults else None
        except ContextParallelError as error:
            fault = error
        agree(fault, mesh=_all_ranks(device_mesh))
        if check is None:
            raise AssertionError("no check was made, and no fault was found.")
        return ShardingPlan(
            module_specs={plan.fqn: self._spec_of(plan) for plan in check.boundaries},
            boundaries=check.boundaries,
            cp_size=cp_size,
            tensor_parallel=check.tensor_parallel,
        )

    def check(
        self,
        model: torch.nn.Module | None,
        *,
        cp_size: int,
        device: torch.device | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
    ) -> PlanCheck:
        """Check the specs against a model and return every fault; needs no ranks.

        Args:
            model: The model; it may be on the meta device. None looks at what shows without one.
            cp_size: Ranks over which the sequence is sharded.
            device: Where the model will run; None is where its parameters are.
            tp_size, sequence_parallel, loss_parallel: As for `plan`.
        """
        faults = [Fault(message=message) for message in self._spec_faults(cp_size)]
        declarations: list[MethodDeclaration] = []
        for override in self._overrides:
            try:
                declarations.append(override.declaration())
            except ContextParallelError as error:
                faults.append(Fault(message=f"{_label(override)}: {error}"))
        if model is None:
            return PlanCheck(boundaries=(), faults=(*faults, *check_methods(declarations)))
        tensor_parallel = _checked_tensor_parallel(
            model, tp_size=tp_size, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
        )
        setting: dict[str, Any] = {"cp_size": cp_size, "device": device, "tp_degrees": tensor_parallel.head_degrees}
        check = check_declarations(model, declarations, **setting)
        faults += check.faults
        suggestion = suggest_declarations(model, declarations, **setting) if faults and cp_size > 1 else None
        return PlanCheck(
            boundaries=check.plans,
            faults=(*faults, *tensor_parallel.faults),
            suggestion=suggestion,
            tensor_parallel=tensor_parallel.plan,
        )

    def _spec_faults(self, cp_size: int) -> Iterator[str]:
        for override in self._overrides:
            dispatch = override.spec.region_dispatch
            if cp_size > 1 and dispatch is not False:
                found = "lacks it" if dispatch is None else f"has {str(dispatch).lower()}"
                yield (
                    f"{_label(override)} needs region_dispatch: false, but {found}: the method communicates by itself, "
                    "and a declarative boundary around it would do so again."
                )

    def _spec_of(self, plan: BoundaryPlan) -> ModuleShardingSpec:
        place = _place(plan.declaration)
        return next(override.spec for override in self._overrides if _place(override.declaration()) == place)


def _override(match: str, spec: ModuleShardingSpec) -> ResolvedOverride:
    if not isinstance(spec, ModuleShardingSpec):
        raise InvalidInputError(
            f"plan_overrides must map patterns to ModuleShardingSpec, but {match!r} has a {type(spec).__name__}."
        )
    return ResolvedOverride(match=match, spec=spec, source="plan_overrides")


def _place(declaration: MethodDeclaration) -> tuple[str, str, str | None]:
    return declaration.source, declaration.match, declaration.inner_target


def _checked_tensor_parallel(model: torch.nn.Module, *, tp_size: int, **switches: bool) -> TensorParallelCheck:
    idle = [name for name, on in switches.items() if on and tp_size == 1]
    if idle:
        message = f"{' and '.join(idle)}: shards over tensor-parallel ranks, but tp_size is 1; leave it false."
        return TensorParallelCheck(faults=(Fault(message=message),))
    return check_tensor_parallel(model, tp_size=tp_size, **switches)


def _check_size(device_mesh: DeviceMesh | None, axis: str, size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidInputError(f"{axis}_size must be a whole number of at least 1, but is {size!r}.")
    if size > 1:
        mesh_axis(device_mesh, axis, size)


def _all_ranks(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    return device_mesh if device_mesh is None or device_mesh.ndim == 1 else device_mesh._flatten()


def plan_error(check: PlanCheck) -> ContextParallelError:
    """Return all faults of a check as one error, with entries that fit where there are any."""
    lines = [fault.message for fault in check.faults]
    entries = None if check.suggestion is None else entries_of(check.suggestion)
    if check.suggestion is not None and entries is not None:
        lines += [f"{check.suggestion.heading}:", as_yaml({"plan_overrides": entries})]
    kind = UnsupportedError if all(fault.unsupported for fault in check.faults) else InvalidInputError
    return kind("\n".join(lines))


def mesh_axis(device_mesh: DeviceMesh | None, axis: str, size: int) -> DeviceMesh:
    """Return the 1-D mesh of an axis of a device mesh.

    Raises:
        InvalidInputError: If there is no such axis, or it has another size.
    """
    names = () if device_mesh is None else device_mesh.mesh_dim_names or ()
    if device_mesh is None or axis not in names:
        raise InvalidInputError(
            f"{axis}_size is {size}, but the device mesh has no axis {axis!r}; its axes are "
            f"{', '.join(names) or 'unnamed'}."
        )
    mesh = device_mesh[axis]
    if mesh.size() != size:
        raise InvalidInputError(f"{axis}_size is {size}, but axis {axis!r} of the device mesh has {mesh.size()} ranks.")
    return mesh


def _label(override: ResolvedOverride) -> str:
    return f"{override.source} ({override.match!r})"


def _refuse_other_parallelism(sizes: Mapping[str, int]) -> None:
    asked = [f"{name} {size}" for name, size in sizes.items() if size != 1]
    if asked:
        raise UnsupportedError(f"{', '.join(asked)}: not supported in this version of cp-trainer-glue; leave it off.")
