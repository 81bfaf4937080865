"""Replacement forwards of modules that call `F.scaled_dot_product_attention` themselves.

B batch, N query heads, Nkv key/value heads, S global and L = S / C local sequence, D head dim.

`SdpaForward` exchanges at the call, so keys and values travel as the module hands them to it. `QkvForward` exchanges at
the module's boundary, before the module may expand them:

    forward(q, k, v) --exchange--> forward(q [L], k [S], v [S]) --its attention call--> local attention [L] --> output
"""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from cp_collectives import mesh_size
from cp_core import AttentionShape, InvalidInputError, UnsupportedError

from ._boundary import AttentionBoundary, BoundaryForward
from ._sdpa_calls import SdpaCall, SdpaCalls, require_supported

Layout = Literal["BNSD", "BSND"]
SEQUENCE_DIMS: dict[str, int] = {"BNSD": 2, "BSND": 1}


class Heads(NamedTuple):
    """What a user declares of an attention that has no config to read it from."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


class SdpaForward(BoundaryForward):
    """The module's own forward, with its attention call taken over; the compiler leaves all of it alone."""

    def __init__(self, module: torch.nn.Module, boundary: AttentionBoundary, *, heads: Heads | None) -> None:
        super().__init__(module, boundary)
        boundary.seam = "torch.nn.functional.scaled_dot_product_attention"
        self._heads = heads
        # Not a decorator, since it imports the compiler, which takes seconds; unbound, so that a copy runs itself.
        self._run_alone = torch.compiler.disable(
            type(self)._run, reason=f"{boundary.name} is a context-parallel attention; compile without fullgraph=True"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_alone(self, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._boundary.forward_call(kwargs, training=self._training):
            grad_enabled = torch.is_grad_enabled()

            def take(call: SdpaCall) -> torch.Tensor:
                self._require_servable(call, grad_enabled=grad_enabled)
                self._require_heads(call.query, call.key)
                return self._boundary.attend(*call[:3], make_meta=call.meta)

            with SdpaCalls(take):
                return self._original(*args, **self._own_keywords(kwargs))

    def _require_servable(self, call: SdpaCall, *, grad_enabled: bool) -> None:
        name, layout = self._boundary.name, self._boundary.layout
        require_supported(call, name)
        if grad_enabled and not torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name}: scaled_dot_product_attention was called without gradients in a forward with them, as "
                "reentrant checkpointing inside the module does, whose recomputation would not pass here; checkpoint "
                "the whole module or its block."
            )
        if not call.is_causal and layout.local_length == 1 < layout.padded_length:
            raise UnsupportedError(
                f"{name}: scaled_dot_product_attention was called with is_causal=False for the one token of this "
                "rank, where modules often leave causality out; use a sequence of at least 2 tokens per rank."
            )

    def _require_heads(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Check tensors `[B, N, L, D]` against what was declared, and the method against them; needs no ranks."""
        boundary = self._boundary
        found = Heads(query.shape[1], key.shape[1], query.shape[3])
        if self._heads is not None and found != self._heads:
            raise InvalidInputError(
                f"{boundary.name}: declared are {_listed(self._heads)}, but its forward has {_listed(found)}."
            )
        shape = AttentionShape(**found._asdict(), dtype=query.dtype, device=query.device, fqn=boundary.name)
        if boundary.strategy is not None:
            boundary.strategy.validate_shape(mesh_size(boundary.cp_mesh), shape)


class QkvForward(SdpaForward):
    """The forward of a module that is handed queries, keys and values; these are exchanged before it runs."""

    def __init__(
        self,
        module: torch.nn.Module,
        boundary: AttentionBoundary,
        *,
        names: Sequence[str],
        layout: Layout,
        heads: Heads | None,
    ) -> None:
        super().__init__(module, boundary, heads=heads)
        self._names, self._layout = tuple(names), layout
        self._is_bidirectional = False

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._boundary.forward_call(kwargs, training=self._training):
            grad_enabled = torch.is_grad_enabled()
            given = inspect.signature(self._original).bind(*args, **self._own_keywords(kwargs))
            local = self._local_tensors(given)
            exchanged = self._boundary.exchange(*local)

            def take(call: SdpaCall) -> torch.Tensor:
                self._require_lengths(call, exchanged)
                self._require_servable(call, grad_enabled=grad_enabled)
                if not (call.is_causal or self._is_bidirectional):
                    self._require_bidirectional(given, local)
                return self._boundary.attend_exchanged(*call[:3], make_meta=call.meta)

            with SdpaCalls(take):
                changed = self._with_tensors(given, exchanged)
                return self._original(*changed.args, **changed.kwargs)

    def _local_tensors(self, given: inspect.BoundArguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries `[B, N, L, D]`, keys and values `[B, Nkv, L, D]`, from whichever layout was declared."""
        length, dim = self._boundary.layout.local_length, SEQUENCE_DIMS[self._layout]
        tensors = [given.arguments.get(name) for name in self._names]
        fits = [isinstance(t, torch.Tensor) and t.ndim == 4 and t.shape[dim] == length for t in tensors]
        if not all(fits):
            found = [str(tuple(t.shape)) if isinstance(t, torch.Tensor) else type(t).__name__ for t in tensors]
            raise InvalidInputError(
                f"{self._boundary.name}: {', '.join(self._names)} of its forward must be {self._layout} tensors of "
                f"four dimensions with S = {length} tokens of this rank, but are {', '.join(found)}; declare layout "
                "and arguments as they are, and shard the batch with shard_batch_for_cp."
            )
        q, k, v = (tensor.transpose(1, 2) if dim == 1 else tensor for tensor in tensors if tensor is not None)
        self._require_heads(q, k)
        return q, k, v

    def _with_tensors(self, given: inspect.BoundArguments, tensors: Sequence[torch.Tensor]) -> inspect.BoundArguments:
        """Return the arguments of the forward with `[B, *, *, D]` tensors in place of its own, in its layout."""
        changed = inspect.BoundArguments(given.signature, type(given.arguments)(given.arguments))
        for name, tensor in zip(self._names, tensors, strict=True):
            changed.arguments[name] = tensor.transpose(1, 2) if self._layout == "BSND" else tensor
        return changed

    def _require_lengths(self, call: SdpaCall, exchanged: Sequence[torch.Tensor]) -> None:
        found, expected = call.query.shape[-2], exchanged[0].shape[2]
        found_keys, expected_keys = call.key.shape[-2], exchanged[1].shape[2]
        if (found, found_keys) != (expected, expected_keys):
            raise InvalidInputError(
                f"{self._boundary.name}: its forward was handed queries of {expected} tokens and keys of "
                f"{expected_keys}, but called scaled_dot_product_attention with {found} and {found_keys}; declare "
                "layout as it is, or use sdpa_hf, which exchanges at the call."
            )

    def _require_bidirectional(self, given: inspect.BoundArguments, local: Sequence[torch.Tensor]) -> None:
        """Refuse a module that is causal among as many keys as queries, and not when it is handed more keys.

        Its forward is run up to its attention call with what this rank was given; once, since it says it of itself.
        """
        unexchanged = self._with_tensors(given, [tensor.detach().clone() for tensor in local])
        device = local[0].device
        devices = [] if device.type == "cpu" else [device]
        causal = True

        def stop(call: SdpaCall) -> torch.Tensor:
            nonlocal causal
            causal = call.is_causal
            raise _ReachedError

        random = torch.random.fork_rng(devices, device_type=device.type)
        with contextlib.suppress(_ReachedError), torch.no_grad(), random, SdpaCalls(stop):
            self._original(*unexchanged.args, **unexchanged.kwargs)
        if causal:
            raise UnsupportedError(
                f"{self._boundary.name}: its forward asks for is_causal=True where there are as many keys as queries, "
                "but not for the gathered keys of sdpa_qkv; use sdpa_hf, which exchanges at the call."
            )
        self._is_bidirectional = True


class _ReachedError(Exception):
    """Ends a forward at its attention call."""


def _listed(heads: Heads) -> str:
    return ", ".join(f"{name}={value}" for name, value in heads._asdict().items())
