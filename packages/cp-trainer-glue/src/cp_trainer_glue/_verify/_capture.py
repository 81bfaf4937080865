"""What each attention and each layer of a model gave in one forward, in the order in which they ran."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from cp_wrappers import find_attention_boundaries

from .._blocks import transformer_blocks

LOGITS = "logits"


class LayerCapture:
    """Context manager that records a model's forwards through hooks; the same for a wrapped model and a plain one.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._handles = model, list[Any]()
        # First output tensor of each module, on the host, in the order of running; the model's logits last.
        self.outputs: dict[str, torch.Tensor] = {}
        # The keyword arguments that the model got.
        self.received: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for name, module in _watched(self._model).items():
            self._handles.append(module.register_forward_hook(self._recorder(name)))
        self._handles.append(self._model.register_forward_pre_hook(self._receive, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(self._recorder(LOGITS)))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """Forget the forward before: another one begins."""
        self.outputs, self.received = {}, {}

    def _recorder(self, name: str) -> Any:
        def record(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if name not in self.outputs:  # else it runs once more, in a backward
                tensor = _first_tensor(output)
                if tensor is not None and tensor.ndim >= 2:  # a loss that is made in chunks leaves no logits
                    self.outputs[name] = _on_host(tensor)

        return torch.compiler.disable(record)

    def _receive(self, _module: torch.nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
        if not self.received:
            self.received = dict(kwargs)


def watched_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that are recorded, in the model's order."""
    return list(_watched(model))


def _watched(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    found = {**_embedding(model), **find_attention_boundaries(model), **transformer_blocks(model)}
    order = {id(module): position for position, module in enumerate(model.modules())}
    return dict(sorted(found.items(), key=lambda item: order[id(item[1])]))


def _embedding(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    find = getattr(model, "get_input_embeddings", None)
    embedding = None if find is None else find()
    return {name: module for name, module in model.named_modules() if embedding is not None and module is embedding}


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    logits = output.get(LOGITS) if isinstance(output, Mapping) else getattr(output, LOGITS, None)
    if isinstance(logits, torch.Tensor):
        return logits
    if isinstance(output, tuple | list):
        return next((part for part in output if isinstance(part, torch.Tensor)), None)
    return None


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.full_tensor()
    return local.to("cpu", copy=True).contiguous()
