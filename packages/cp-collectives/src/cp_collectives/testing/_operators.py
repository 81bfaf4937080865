"""Which of an operator's tensors it reads and writes, as its schema says."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# They take shape, dtype and device from a tensor and leave its data alone; no schema says so.
_METADATA_ONLY = re.compile(r"aten::(\w+_like|new_\w+|record_stream)")


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operator's argument or result, lists of lists included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield each tensor whose data the operator uses, and whether it writes there."""
    if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator, which has no schema
        yield from ((tensor, False) for tensor in tensors_in((args, kwargs)))
        return
    if not uses_data(func):
        return
    written = _written_arguments(func)
    for argument, value in (*zip(written, args, strict=False), *kwargs.items()):
        for tensor in tensors_in(value):
            yield tensor, written[argument]


def is_view(func: Any) -> bool:
    """Return whether the operator says that it returns views: `contiguous`, `reshape` and `to` then need not."""
    return isinstance(func, torch._ops.OpOverload) and func.is_view


def is_copy(result: object, args: tuple[Any, ...]) -> bool:
    """Return whether a result has memory of its own."""
    return not _storages(result) <= _storages(args)


@cache
def uses_data(func: torch._ops.OpOverload) -> bool:
    """Return whether the operator reads or writes elements, and not only shapes, strides or offsets."""
    name = func._schema.name
    if torch.Tag.inplace_view in func.tags:
        return name.startswith("aten::resize")  # it may move or free the memory
    has_out = any(_written_arguments(func).values()) and name != "aten::record_stream"
    return not func.is_view and (has_out or _METADATA_ONLY.fullmatch(name) is None)


def _storages(value: object) -> set[int]:
    strided = (tensor for tensor in tensors_in(value) if tensor.layout is torch.strided)  # others have no one storage
    return {tensor.untyped_storage()._cdata for tensor in strided}


@cache
def _written_arguments(func: torch._ops.OpOverload) -> dict[str, bool]:
    """Return the names of the operator's arguments, in order, and whether it writes to each."""
    name = func._schema.name
    # The schemas of c10d hide their writes: what its in-place operators do not call input they write to.
    hides = name.startswith("c10d::") and name.endswith("_") and "barrier" not in name
    return {
        argument.name: (hides and not argument.name.startswith("input"))
        or (argument.alias_info is not None and argument.alias_info.is_write)
        for argument in func._schema.arguments
    }
