"""A stand-in for the npu device in pure Python: it shows that code is device-neutral, and nothing about an NPU.

Tensors report `device.type == "npu"` and keep their data in an ordinary CPU tensor; each operation, collectives
included, runs on that CPU tensor. No kernel, stream, memory or HCCL behaviour is modelled, so a test that passes here
is no NPU evidence. What it does find is code that assumes cpu or cuda: mixing a CPU tensor into an operation on npu
tensors is an error here too. Known limit of torch 2.13: an error raised in backward outside of a custom
`autograd.Function` aborts the process (torch's Python device guard may not run while an error is on its way), where a
device would raise it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import (
    _get_privateuse1_backend_name,
    _setup_privateuseone_for_python_backend,
)

from cp_collectives.testing._npu_module import StandInModule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Operations that move data between devices, and operations whose index operands may stay on the CPU.
_CROSS_DEVICE_OPS = frozenset({"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::set_"})
_CPU_INDEX_OPS = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


class NpuStandInTensor(torch.Tensor):
    """A tensor on the stand-in npu device: shape and dtype of its CPU payload, device npu:0. No NPU evidence."""

    payload: torch.Tensor

    @staticmethod
    def __new__(cls, payload: torch.Tensor) -> NpuStandInTensor:
        tensor: NpuStandInTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            payload.shape,
            strides=payload.stride(),
            storage_offset=payload.storage_offset(),
            dtype=payload.dtype,
            device=torch.device("npu", 0),
        )
        tensor.payload = payload
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch reads it as Any
        return f"NpuStandInTensor({self.payload!r})"

    def tolist(self) -> Any:
        """Return the values as nested lists, or one number for a scalar."""
        return self.payload.tolist()

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled: another process need not have the stand-in."""
        raise TypeError("A stand-in npu tensor cannot leave its process; return to_cpu(tensor) instead.")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function where it calls a class method
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` on the CPU payloads and wrap what it returns."""
        return _run_on_payload(func, args, kwargs or {})


def install_npu_stand_in() -> None:
    """Make device "npu" usable in this process through the stand-in; a second call does nothing. No NPU evidence.

    Fits `World(size, setup=install_npu_stand_in, backend="cpu:gloo,npu:gloo")`. It cannot be undone: torch allows one
    name for its PrivateUse1 device per process.

    Raises:
        RuntimeError: The process already has another PrivateUse1 backend, for example the real torch_npu.
    """
    if isinstance(getattr(torch, "npu", None), StandInModule):
        return
    name = _get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(
            f"The npu stand-in needs the free PrivateUse1 device, but this process already has backend {name!r} there; "
            "use the stand-in in a process that does not load it."
        )
    fallback = torch.library.Library("_", "IMPL")
    # Factories have no tensor argument, so they arrive here instead of at __torch_dispatch__.
    fallback.fallback(_run_fallback, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    # torch.tensor(data, device="npu") copies with __torch_dispatch__ switched off, and then a fallback is not found.
    aten.impl("copy_", _copy_into, "PrivateUse1")
    _setup_privateuseone_for_python_backend("npu", backend_module=StandInModule((fallback, aten)))


def to_npu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the stand-in npu device, differentiably. No NPU evidence.

    Args:
        tensor: Any shape and dtype.

    Returns:
        A tensor of the same shape and dtype whose device is npu:0.
    """
    return tensor.to(torch.device("npu", 0))


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of the stand-in npu device to an ordinary CPU tensor, differentiably; ranks return these.

    Args:
        tensor: Any shape and dtype.

    Returns:
        A CPU tensor of the same shape and dtype.
    """
    return tensor.to(torch.device("cpu"))


def _run_fallback(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    return _run_on_payload(func, args, kwargs)


def _copy_into(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    payloads = (_unwrap(target), _unwrap(source))
    torch.ops.aten.copy_.default(*payloads, non_blocking)
    return target


def _run_on_payload(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _validate_devices(func, tree_flatten((args, kwargs))[0])
    device = kwargs.get("device")
    result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    if device is not None and torch.device(device).type != "npu":
        return result
    wrapped = tree_map(_wrap, result)
    if func.namespace != "aten":
        # Collectives write through the payloads of their arguments; their schemas declare no aliases.
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _validate_devices(func: torch._ops.OpOverload, leaves: Iterable[object]) -> None:
    name = func._schema.name
    if name in _CROSS_DEVICE_OPS or name in _CPU_INDEX_OPS:
        return
    for leaf in leaves:
        # A CPU scalar may take part in an operation of any device.
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, NpuStandInTensor) and leaf.dim() > 0:
            raise RuntimeError(
                f"{name} needs all tensors on one device, but got npu:0 and {leaf.device} (shape {tuple(leaf.shape)}); "
                "create the tensor on the device of the others."
            )


def _unwrap(value: object) -> object:
    if isinstance(value, NpuStandInTensor):
        return value.payload
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value


def _wrap(value: object) -> object:
    if isinstance(value, torch.Tensor) and not isinstance(value, NpuStandInTensor):
        return NpuStandInTensor(value)
    return value
