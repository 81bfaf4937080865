"""Which of the registered wrappers could serve an attention, and why the others could not."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from cp_core import AttentionShape, ContextParallelError, ContextParallelStrategy, InvalidInputError

from ._attention_settings import asks_config_for_attention
from ._boundaries import attention_shape
from ._registry import ResolvedWrapper, inner_wrapper_names, resolve_inner_wrapper
from ._targets import FOREIGN_FAILURES, failure_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where attentions will run."""

    # None is where their parameters are.
    device: torch.device | None = None
    # Tensor-parallel ranks over which the heads of an attention are split, by its name; absent is 1.
    tp_degrees: Mapping[str, int] = field(default_factory=dict)


ANYWHERE = Place()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedMethod:
    """A method that can serve one attention."""

    # None for a method with communication of its own.
    strategy: ContextParallelStrategy | None
    # None there, and where heads show at the first forward only.
    shape: AttentionShape | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodVerdict:
    """Whether one registered wrapper could serve one attention."""

    wrapper: str
    # None if it could not, or brings its own communication.
    strategy: ContextParallelStrategy | None = None
    # The heads that the strategy would work on; None without one, and where they show at the first forward only.
    shape: AttentionShape | None = None
    # Why it could not; None if it could.
    reason: str | None = None


def check_method(
    wrapper: ResolvedWrapper, module: torch.nn.Module, fqn: str, *, cp_size: int, place: Place = ANYWHERE
) -> CheckedMethod:
    """Check that a method can serve an attention, without ranks.

    Args:
        wrapper: The method.
        module: The attention.
        fqn: Its name, for errors.
        cp_size: Ranks that share a sequence.
        place: Where it will run.

    Raises:
        ContextParallelError: If it cannot.
    """
    try:
        return _checked(wrapper, module, fqn, cp_size=cp_size, place=place)
    except ContextParallelError:
        raise
    except FOREIGN_FAILURES as error:  # a user's code: said in a line, like every other fault
        raise InvalidInputError(f"{fqn}: checking {wrapper.name!r} failed: {failure_in(error)}") from error


def _checked(
    wrapper: ResolvedWrapper, module: torch.nn.Module, fqn: str, *, cp_size: int, place: Place
) -> CheckedMethod:
    strategy = wrapper.strategy()
    if wrapper.contract.check is not None:
        wrapper.contract.check(module, fqn, **wrapper.arguments)
    if wrapper.contract.strategy is None:
        return CheckedMethod(strategy=None, shape=None)
    if not isinstance(strategy, ContextParallelStrategy):
        raise InvalidInputError(
            f"the strategy of {wrapper.name!r} must make a ContextParallelStrategy, but made a "
            f"{type(strategy).__name__}."
        )
    if wrapper.contract.shape is None:
        shape: AttentionShape | None = attention_shape(module, fqn, device=place.device)
    else:
        shape = wrapper.contract.shape(module, fqn, device=place.device, **wrapper.arguments)
    if shape is not None and asks_config_for_attention(module):  # a config has the heads of all ranks
        shape = split_heads(shape, place.tp_degrees.get(fqn, 1))
    if shape is not None:
        strategy.validate_shape(cp_size, shape)
    return CheckedMethod(strategy=strategy, shape=shape)


def split_heads(shape: AttentionShape, tp_degree: int) -> AttentionShape:
    """Return the heads that one tensor-parallel rank has of an attention.

    Args:
        shape: The attention with all its heads.
        tp_degree: Ranks over which they are split.

    Raises:
        InvalidInputError: If they cannot be split evenly.
    """
    if shape.num_q_heads % tp_degree or shape.num_kv_heads % tp_degree:
        raise InvalidInputError(
            f"{shape.fqn}: tensor parallelism splits heads: num_q_heads ({shape.num_q_heads}) and num_kv_heads "
            f"({shape.num_kv_heads}) must be divisible by tp_size ({tp_degree}); use a tp_size that divides both."
        )
    return replace(shape, num_q_heads=shape.num_q_heads // tp_degree, num_kv_heads=shape.num_kv_heads // tp_degree)


def judge_methods(
    boundaries: Mapping[str, torch.nn.Module],
    *,
    cp_size: int,
    device: torch.device | None = None,
    tp_degrees: Mapping[str, int] | None = None,
) -> dict[str, list[MethodVerdict]]:
    """Judge every registered wrapper for every attention.

    Args:
        boundaries: Attentions by name.
        cp_size: Ranks that share a sequence.
        device: Where they will run; None is where their parameters are.
        tp_degrees: Tensor-parallel ranks over which the heads of an attention are split, by its name; absent is 1.

    Returns:
        By attention, a verdict for each registered name, simplest names first.
    """
    place = Place(device=device, tp_degrees=tp_degrees or {})
    resolved: dict[str, ResolvedWrapper | str] = {}
    for name in sorted(inner_wrapper_names(), key=lambda name: (len(name), name)):
        try:
            resolved[name] = resolve_inner_wrapper(name)
        except ContextParallelError as error:
            resolved[name] = str(error)
    return {
        fqn: [_judge(name, wrapper, module, fqn, cp_size=cp_size, place=place) for name, wrapper in resolved.items()]
        for fqn, module in boundaries.items()
    }


def _judge(
    name: str,
    wrapper: ResolvedWrapper | str,
    module: torch.nn.Module,
    fqn: str,
    *,
    cp_size: int,
    place: Place,
) -> MethodVerdict:
    if isinstance(wrapper, str):
        return MethodVerdict(wrapper=name, reason=wrapper)
    try:
        checked = check_method(wrapper, module, fqn, cp_size=cp_size, place=place)
    except ContextParallelError as error:
        return MethodVerdict(wrapper=name, reason=str(error))
    return MethodVerdict(wrapper=name, strategy=checked.strategy, shape=checked.shape)
