"""`sharding_mode: validate`: tensors cross each attention's boundary as DTensors, and what they are is looked at.

Outputs and gradients have the bits of production: a DTensor is made of the local tensor and gives it back, and nothing
is sent but digests, over the control plane. It is slow, and meant for a few steps.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.hooks import RemovableHandle

from cp_collectives import gather_objects
from cp_core import InvalidInputError, SequenceLayout, tensor_digest
from cp_wrappers import layout_given_to

from ._placements import PLACED_AXES, BoundaryPlacements, Placements, View, placement_fault

# Axes of the root mesh that an axis of FSDP's own mesh stands for.
_PARTS_OF_AXIS = {"dp_shard_cp": ("dp_shard", "cp"), "dp_cp": ("dp_replicate", "dp_shard", "cp")}


@dataclass(kw_only=True, slots=True)
class Validation:
    """What watches a model; made by `validate_boundaries`."""

    device_mesh: DeviceMesh
    _hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh's axes."""
        return tuple(self.device_mesh.mesh_dim_names or ())

    def watch(self, fqn: str, module: torch.nn.Module, placements: BoundaryPlacements) -> None:
        """Watch one attention from its next forward on."""
        boundary = _Boundary(self, fqn, placements)
        self._hooks.append(module.register_forward_pre_hook(boundary.enter, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(boundary.leave, with_kwargs=True))

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def check_parameters(self, named: Iterable[tuple[str, torch.nn.Parameter]], *, gradients: bool) -> None:
        """Check that parameters, or their gradients, are equal on all ranks that hold the same part of them.

        Args:
            named: Name and parameter, the same on all ranks.
            gradients: Whether to look at the gradients.

        Raises:
            InvalidInputError: On all ranks, naming the first that is not, with axis and ranks.
        """
        sharded, digests = {}, {}
        for name, param in named:
            tensor = param.grad if gradients else param
            sharded[name] = _sharding_axes(param)
            digests[name] = None if tensor is None else tensor_digest(_local(tensor))
        everywhere = gather_objects((self._coordinates(), digests), mesh=self.world)
        for name, axes in sharded.items():
            views = [View(coordinates=c, shape=(), digest=str(d.get(name))) for c, d in everywhere]
            replicated: Placements = {axis: Replicate() for axis in PLACED_AXES if axis not in axes}
            fault = placement_fault(views, replicated, axes=self.axes)
            if fault is not None:
                what = "the gradient of parameter" if gradients else "parameter"
                raise InvalidInputError(
                    f"{what} {name} {fault.partition(' (shapes')[0]}; its gradient is not summed over "
                    f"{_axis_in(fault)}, or was changed on one rank."
                )

    @property
    def world(self) -> DeviceMesh:
        """All ranks in one axis."""
        return self.device_mesh if self.device_mesh.ndim == 1 else self.device_mesh._flatten()

    def _coordinates(self) -> tuple[int, ...]:
        return tuple(self.device_mesh.get_coordinate() or ())

    def views(self, tensor: torch.Tensor, local_length: int | None) -> list[View]:
        """Return what each rank has in the place of a tensor, in rank order."""
        own = View(
            coordinates=self._coordinates(),
            shape=tuple(tensor.shape),
            digest=tensor_digest(tensor),
            local_length=local_length,
        )
        return gather_objects(own, mesh=self.world)

    def carried(self, tensor: torch.Tensor, placements: Placements) -> torch.Tensor:
        """Return a local tensor that went through a DTensor of the declared placements."""
        declared: list[Placement] = [placements.get(axis, Replicate()) for axis in self.axes]
        return DTensor.from_local(tensor, self.device_mesh, declared, run_check=False).to_local()


class _Boundary:
    """The hooks of one attention."""

    def __init__(self, validation: Validation, fqn: str, placements: BoundaryPlacements) -> None:
        self._validation, self._fqn, self._placements = validation, fqn, placements
        self._inputs: list[str] | None = None

    def enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        length = _local_length(layout_given_to(module, kwargs))
        self._inputs = None

        def carried(tensor: torch.Tensor) -> torch.Tensor:
            views = self._validation.views(tensor, length)
            self._inputs = self._inputs or [view.digest for view in views]
            fault = placement_fault(views, self._placements.inputs, axes=self._validation.axes)
            self._raise("input", fault)
            return self._carried(tensor, "input", self._placements.inputs, self._gradients_of_inputs())

        args = tuple(carried(arg) if _is_placed(arg) else arg for arg in args)
        return args, {name: carried(value) if _is_placed(value) else value for name, value in kwargs.items()}

    def leave(self, module: torch.nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not _is_placed(first):
            return output
        placements, length = self._placements.outputs, _local_length(layout_given_to(module, kwargs))
        views = self._validation.views(first, length)
        self._raise("output", placement_fault(views, placements, axes=self._validation.axes, inputs=self._inputs))
        carried = self._carried(first, "output", placements, placements)
        return (carried, *output[1:]) if isinstance(output, tuple) else carried

    def _carried(
        self, tensor: torch.Tensor, what: str, placements: Placements, of_gradient: Placements
    ) -> torch.Tensor:
        carried = self._validation.carried(tensor, placements)
        if carried.requires_grad:
            carried.register_hook(self._gradient_check(what, of_gradient))
        return carried

    def _gradient_check(self, what: str, placements: Placements) -> Callable[[torch.Tensor], None]:
        def check(gradient: torch.Tensor) -> None:
            views = self._validation.views(gradient, None)
            fault = placement_fault(views, placements, axes=self._validation.axes, exact_lengths=False)
            self._raise(f"gradient of its {what}", fault)

        return check

    def _gradients_of_inputs(self) -> Placements:
        if self._placements.whole_input_gradients:
            return self._placements.inputs
        return {axis: placement for axis, placement in self._placements.inputs.items() if axis != "tp"}

    def _raise(self, what: str, fault: str | None) -> None:
        if fault is not None:  # the same on all ranks, since all have all views
            key = "input_placements" if "input" in what else "output_placements"
            raise InvalidInputError(
                f"{self._fqn}: {what if what.startswith('gradient') else f'its {what}'} {fault}; mend the wrapper, or "
                f"declare what it does in {key}."
            )


def _is_placed(value: object) -> bool:
    """Whether a value is hidden states, queries, keys or values, which all have a batch, tokens and features."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 3


def _local_length(layout: SequenceLayout | None) -> int | None:
    return None if layout is None else layout.local_length


def _sharding_axes(param: torch.nn.Parameter) -> set[str]:
    if not isinstance(param, DTensor):
        return set()
    names = param.device_mesh.mesh_dim_names or ()
    sharding = [n for n, placement in zip(names, param.placements, strict=True) if not placement.is_replicate()]
    return {part for name in sharding for part in _PARTS_OF_AXIS.get(name, (name,))}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _axis_in(fault: str) -> str:
    return fault.partition("replicate over ")[2].partition(",")[0]
