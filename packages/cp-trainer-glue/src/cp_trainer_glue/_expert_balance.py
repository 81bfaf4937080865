"""The load-balancing loss of experts, taken over from the model, which would make it of its own rank's tokens."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_core import SequenceLayout, UnsupportedError, load_balancing_loss, real_local_tokens

_SWITCH = "model.config.output_router_logits"


class ExpertBalance:
    """Records the router logits of a model's forwards and makes their loss over all ranks."""

    def __init__(self, *, coefficient: float, top_k: int, routers: list[torch.nn.Module], index: int) -> None:
        self._coefficient, self._top_k = coefficient, top_k
        self._recorded: list[torch.Tensor] | None = None
        for router in routers:
            router.register_forward_hook(lambda _module, _args, output: self._record(output[index]))

    @classmethod
    def take_over(cls, model: Any) -> Self | None:
        """Take the loss over from a model that is configured to have it, and turn the model's own off.

        Args:
            model: A model of transformers, before anything was applied to it.

        Returns:
            None where the model has no such loss.

        Raises:
            UnsupportedError: If it is not the loss that is known here, or its routers are not known.
        """
        if not getattr(model.config, "output_router_logits", False):
            return None
        module = sys.modules[type(model).__module__]
        function: Callable[..., Any] | None = getattr(module, "load_balancing_loss_func", None)
        names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
        lacking = [name for name in names if not hasattr(model, name)]
        if function is None or lacking or not _is_known(function):
            raise UnsupportedError(
                f"{_SWITCH}: the expert loss of {type(model).__name__} is not the load balancing of Mixtral's kind, "
                "which is the one that has a reduction over ranks; set it to false."
            )
        routers, index = _routers(model)
        model.config.output_router_logits = False
        return cls(
            coefficient=model.router_aux_loss_coef, top_k=model.num_experts_per_tok, routers=routers, index=index
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the router logits of one forward; what is recomputed in backward is not recorded again."""
        self._recorded = []
        try:
            yield
        except BaseException:
            self._recorded = None
            raise

    def loss_part(self, layout: SequenceLayout, *, batch_size: int, dp_cp_mesh: DeviceMesh | None) -> torch.Tensor:
        """Return this rank's part of the loss of the forward that was recorded, times the model's coefficient, 0-d.

        Args:
            layout: The layout of the shard, whose pads do not count.
            batch_size: Rows of the shard.
            dp_cp_mesh: 1-D mesh of the ranks that hold different tokens.
        """
        if not self._recorded:
            raise AssertionError("no router logits were recorded; run the model inside recording().")
        recorded, self._recorded = self._recorded, None
        real = real_local_tokens(layout, batch_size=batch_size).flatten()
        return self._coefficient * load_balancing_loss(
            recorded, top_k=self._top_k, dp_cp_mesh=dp_cp_mesh, real_tokens=real
        )

    def _record(self, logits: torch.Tensor) -> None:
        if self._recorded is not None:
            self._recorded.append(logits)


def _routers(model: Any) -> tuple[list[torch.nn.Module], int]:
    """Return the modules whose output holds router logits, and where in it, as transformers records them."""
    recorders = [
        module._can_record_outputs["router_logits"]
        for module in model.modules()
        if "router_logits" in (getattr(module, "_can_record_outputs", None) or {})
    ]
    target = getattr(recorders[-1], "target_class", None) if recorders else None
    routers = [module for module in model.modules() if target is not None and isinstance(module, target)]
    if not routers:
        raise UnsupportedError(
            f"{_SWITCH}: transformers does not say which modules of {type(model).__name__} are its routers; set it to "
            "false."
        )
    return routers, int(recorders[-1].index)


def _is_known(function: Callable[..., Any]) -> bool:
    """Whether a model's function computes what ours does, tried on numbers with and without pads."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=generator) for _ in range(2))
    real = torch.tensor([1, 1, 0, 1, 1, 0])
    for mask in (None, real):
        try:
            theirs = function(logits, 4, 2, mask)
        except Exception:  # a function of another kind may refuse such numbers in any way
            return False
        ours = load_balancing_loss(logits, top_k=2, dp_cp_mesh=None, real_tokens=None if mask is None else mask.bool())
        if not isinstance(theirs, torch.Tensor) or not torch.allclose(theirs.float(), ours, rtol=1e-5):
            return False
    return True
