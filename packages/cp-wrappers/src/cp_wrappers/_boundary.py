"""One wrapped attention: its method, its mesh, and what it must see in each forward."""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_core import (
    AttentionMeta,
    ContextParallelStrategy,
    HandoffMeta,
    InvalidInputError,
    LifecycleError,
    SequenceLayout,
    UnsupportedError,
)

_ATTRIBUTE = "_context_parallel"
LAYOUT_KEYWORD = "cp_layout"
_CROSS_ATTENTION = ("cross_attention_states", "encoder_hidden_states", "key_value_states")


class AttentionBoundary:
    """The state of one wrapped module; it lies on the module, so a deep copy of the model has its own."""

    def __init__(self, *, name: str, strategy: ContextParallelStrategy | None, cp_mesh: DeviceMesh | None) -> None:
        self.name, self.strategy, self.cp_mesh = name, strategy, cp_mesh
        # Whether attention calls of this module go through the strategy; else its wrapper communicates by itself and
        # the call goes on to the implementation that the model had before.
        self.intercepted = False
        # The call by which attention of this module is recognized, for messages.
        self.seam = "the attention implementation that its config names"
        self.earlier_implementation: str | None = None
        self._default_layout: SequenceLayout | None = None
        self._layout: SequenceLayout | None = None
        self._num_calls = 0
        self._awaiting_backward: weakref.WeakSet[_Awaiting] = weakref.WeakSet()
        # Layouts that were set, of forwards without a graph that reentrant checkpointing has yet to repeat with one.
        self._unrepeated: list[SequenceLayout] = []
        # Those of deep copies of the module; a layout that is set holds for them too.
        self._copies: weakref.WeakSet[AttentionBoundary] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)(name=self.name, strategy=self.strategy, cp_mesh=self.cp_mesh)
        copied.intercepted, copied.earlier_implementation = self.intercepted, self.earlier_implementation
        copied.seam = self.seam
        copied._default_layout = self._default_layout
        self._copies.add(copied)
        return copied

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UnsupportedError(
            f"{self.name}: a wrapped model cannot be pickled; save its state_dict, or call remove() before."
        )

    def check_layout(self, layout: SequenceLayout) -> None:
        """Refuse a layout while a forward under a different one still awaits its backward.

        Raises:
            LifecycleError: Naming the module.
        """
        waiting = any(not awaiting.done and not awaiting.layout.equals(layout) for awaiting in self._awaiting_backward)
        if waiting:
            raise LifecycleError(
                f"{self.name}: a different layout was set while an earlier forward awaits its backward; recomputation "
                "would read the wrong one. Run the backward first, or pass cp_layout as a keyword argument."
            )
        if any(not unrepeated.equals(layout) for unrepeated in self._unrepeated):
            raise LifecycleError(
                f"{self.name}: a different layout was set while an earlier forward in training mode and without a "
                "graph, as reentrant checkpointing runs it, has not been repeated; run the backward first, or pass "
                "cp_layout as a keyword argument. If that forward was an evaluation, call model.eval() before it."
            )
        for copied in self._copies:
            copied.check_layout(layout)

    def set_layout(self, layout: SequenceLayout) -> None:
        """Set the layout for forwards that are not given one."""
        self._default_layout = layout
        for copied in self._copies:
            copied.set_layout(layout)

    def with_layout(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a forward with the layout that was set, if they lack one."""
        if kwargs.get(LAYOUT_KEYWORD) is None and self._default_layout is not None:
            return {**kwargs, LAYOUT_KEYWORD: self._default_layout}
        return kwargs

    @contextmanager
    def forward_call(self, kwargs: dict[str, Any], *, training: bool) -> Iterator[None]:
        """Surround one forward of the module: take its layout, and require exactly one attention call in it."""
        if any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
            raise InvalidInputError(
                f"{self.name} was given a key/value cache; caches are for inference, so call the model "
                "with use_cache=False."
            )
        crossing = sorted(name for name in _CROSS_ATTENTION if kwargs.get(name) is not None)
        if crossing:
            raise UnsupportedError(
                f"{self.name} was given {', '.join(crossing)}: cross attention, whose keys do not come from the "
                "sharded sequence, is not supported; train this model at cp_size 1."
            )
        given = kwargs.get(LAYOUT_KEYWORD)
        self._layout = self._default_layout if given is None else given
        if given is None and self._layout is not None:
            self._note_repetition(self._layout, training=training)
        self._num_calls = 0
        yield
        if self._num_calls != 1:
            raise LifecycleError(
                f"{self.name}: one forward must reach the context-parallel attention once, but it did "
                f"{self._num_calls} times. What is seen are calls of {self.seam}, and no other attention; this module "
                "needs a wrapper of its own."
            )

    def _note_repetition(self, layout: SequenceLayout, *, training: bool) -> None:
        if training and not torch.is_grad_enabled():
            self._unrepeated.append(layout)
        elif torch._C._current_graph_task_id() != -1:  # in a backward: what torch's own checkpoint asks
            repeated = next((i for i, earlier in enumerate(self._unrepeated) if earlier.equals(layout)), None)
            if repeated is not None:
                del self._unrepeated[repeated]

    @property
    def layout(self) -> SequenceLayout:
        """The layout of the forward that runs.

        Raises:
            InvalidInputError: If it was given none.
        """
        if self._layout is None:
            raise InvalidInputError(
                f"{self.name} got no sequence layout: call the model with the batch of shard_batch_for_cp (its "
                f"{LAYOUT_KEYWORD} travels as a keyword argument), or give it to set_layout."
            )
        return self._layout

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, make_meta: Callable[[SequenceLayout], AttentionMeta]
    ) -> torch.Tensor:
        """Compute the attention of this module by its declared method.

        Args:
            q: `[B, N, L, D]` local queries.
            k, v: `[B, Nkv, L, D]` local keys and values.
            make_meta: Describes the attention, given the layout of this forward.
        """
        self._num_calls += 1
        meta = make_meta(self.layout)
        output = self._method.attention(q, k, v, cp_mesh=self.cp_mesh, attention_meta=meta, layer=self.name)
        return self._awaited(output)

    def exchange(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Bring the tensors to where `attend_exchanged` takes them, ahead of the attention call.

        Args:
            q: `[B, N, L, D]` local queries.
            k, v: `[B, Nkv, L, D]` local keys and values.
        """
        self._method.check_layout(self.layout, self.cp_mesh, layer=self.name)
        meta = AttentionMeta(layout=self.layout)  # what is asked of the scores shows at the call
        handoff = HandoffMeta(layer=self.name, attention_meta=meta)
        state = self._method.launch(q, k, v, cp_mesh=self.cp_mesh, handoff_meta=handoff)
        return self._method.wait(state, q, k, v, attention_meta=meta)

    def attend_exchanged(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, make_meta: Callable[[SequenceLayout], AttentionMeta]
    ) -> torch.Tensor:
        """Compute the attention of this module from tensors that come from `exchange`.

        The output is restored here, at the attention call, which is right for a method that leaves queries where they
        are. One that changes their length has to restore the module's own output, in that output's layout.

        Args:
            q, k, v: As exchanged; keys and values may have been expanded to N heads since.
            make_meta: Describes the attention, given the layout of this forward.
        """
        self._num_calls += 1
        meta = make_meta(self.layout)
        self._method.check_meta(meta, layer=self.name)
        return self._awaited(self._method.attend_exchanged(q, k, v, cp_mesh=self.cp_mesh, attention_meta=meta))

    @property
    def _method(self) -> ContextParallelStrategy:
        if self.strategy is None:
            raise AssertionError(f"{self.name} has no strategy, but its attention was intercepted.")
        return self.strategy

    def _awaited(self, output: torch.Tensor) -> torch.Tensor:
        if output.grad_fn is not None:
            self._awaiting_backward.add(_Awaiting.on(output, self.layout))
        return output


class BoundaryForward:
    """The replacement of a module's forward: the module's own, under the watch of its boundary.

    An object and not a closure, so that a deep copy of the model calls the copy's own forward.
    """

    def __init__(self, module: torch.nn.Module, boundary: AttentionBoundary) -> None:
        boundary.intercepted = True
        self._original, self._boundary = module.forward, boundary
        self._takes_layout = _takes_keyword(self._original, LAYOUT_KEYWORD)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._boundary.forward_call(kwargs, training=self._training):
            return self._original(*args, **self._own_keywords(kwargs))

    @property
    def _training(self) -> bool:
        return bool(getattr(getattr(self._original, "__self__", None), "training", False))

    def _own_keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments without the layout, where the module's forward does not take it."""
        if self._takes_layout:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != LAYOUT_KEYWORD}


class ForeignForward:
    """A replacement forward that a user's wrapper made; it cannot be copied with the model."""

    def __init__(self, boundary: AttentionBoundary, replacement: Callable[..., Any]) -> None:
        self._name, self._boundary, self._replacement = boundary.name, boundary, replacement
        self._takes_layout = _takes_keyword(replacement, LAYOUT_KEYWORD)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._takes_layout:
            kwargs = self._boundary.with_layout(kwargs)
        return self._replacement(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise UnsupportedError(
            f"{self._name}: a model whose forward was replaced by a user's wrapper cannot be copied, since the copy "
            "would run this model's modules; copy first and apply then, or call remove() before."
        )


def _takes_keyword(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return False
    return any(p.kind is p.VAR_KEYWORD or (p.name == name and p.kind is not p.POSITIONAL_ONLY) for p in parameters)


def boundary_of(module: torch.nn.Module) -> AttentionBoundary | None:
    """Return the boundary that lies on a module, None if it is not wrapped."""
    return module.__dict__.get(_ATTRIBUTE)


def layout_given_to(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> SequenceLayout | None:
    """Return the layout of a wrapped module's forward: the one among its keyword arguments, or the one that was set.

    Args:
        module: The module.
        kwargs: The keyword arguments of the forward.

    Returns:
        None if the module is not wrapped, or was given none.
    """
    boundary = boundary_of(module)
    keywords = kwargs if boundary is None else boundary.with_layout(dict(kwargs))
    given: SequenceLayout | None = keywords.get(LAYOUT_KEYWORD)
    return given


def attach(module: torch.nn.Module, boundary: AttentionBoundary) -> None:
    """Lay a boundary on a module.

    Raises:
        LifecycleError: If the module is wrapped already.
    """
    if boundary_of(module) is not None:
        raise LifecycleError(f"{boundary.name} is wrapped already; call remove() before it is wrapped again.")
    module.__dict__[_ATTRIBUTE] = boundary


def detach(module: torch.nn.Module) -> None:
    """Take the boundary off a module."""
    module.__dict__.pop(_ATTRIBUTE, None)


def restore_forward(module: torch.nn.Module, earlier: object | None) -> None:
    """Give a module the forward back that stood on it before, None for its class's own, and take its boundary off."""
    module.__dict__.pop("forward", None)
    if earlier is not None:
        module.__dict__["forward"] = earlier
    detach(module)


class _Awaiting:
    """Lives as long as the autograd graph of one forward, and knows when its backward has run."""

    def __init__(self, layout: SequenceLayout) -> None:
        self.layout = layout
        self.done = False

    @classmethod
    def on(cls, output: torch.Tensor, layout: SequenceLayout) -> "_Awaiting":
        awaiting = cls(layout)
        reference = weakref.ref(awaiting)

        def mark_done(_gradient: torch.Tensor) -> None:
            if (alive := reference()) is not None:
                alive.done = True

        output.register_hook(mark_done)
        node: Any = output.grad_fn
        node.metadata[_ATTRIBUTE] = awaiting
        return awaiting
