"""Which of the registered wrappers could serve an attention, and why the others could not."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cp_core import AttentionShape, ContextParallelError, ContextParallelStrategy, InvalidInputError

from ._boundaries import attention_shape
from ._registry import ResolvedWrapper, inner_wrapper_names, resolve_inner_wrapper
from ._targets import FOREIGN_FAILURES, failure_in


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
    wrapper: ResolvedWrapper, module: torch.nn.Module, fqn: str, *, cp_size: int, device: torch.device | None
) -> CheckedMethod:
    """Check that a method can serve an attention, without ranks.

    Args:
        wrapper: The method.
        module: The attention.
        fqn: Its name, for errors.
        cp_size: Ranks that share a sequence.
        device: Where it will run; None is where its parameters are.

    Raises:
        ContextParallelError: If it cannot.
    """
    try:
        return _checked(wrapper, module, fqn, cp_size=cp_size, device=device)
    except ContextParallelError:
        raise
    except FOREIGN_FAILURES as error:  # a user's code: said in a line, like every other fault
        raise InvalidInputError(f"{fqn}: checking {wrapper.name!r} failed: {failure_in(error)}") from error


def _checked(
    wrapper: ResolvedWrapper, module: torch.nn.Module, fqn: str, *, cp_size: int, device: torch.device | None
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
        shape: AttentionShape | None = attention_shape(module, fqn, device=device)
    else:
        shape = wrapper.contract.shape(module, fqn, device=device, **wrapper.arguments)
    if shape is not None:
        strategy.validate_shape(cp_size, shape)
    return CheckedMethod(strategy=strategy, shape=shape)


def judge_methods(
    boundaries: Mapping[str, torch.nn.Module], *, cp_size: int, device: torch.device | None = None
) -> dict[str, list[MethodVerdict]]:
    """Judge every registered wrapper for every attention.

    Args:
        boundaries: Attentions by name.
        cp_size: Ranks that share a sequence.
        device: Where they will run; None is where their parameters are.

    Returns:
        By attention, a verdict for each registered name, simplest names first.
    """
    resolved: dict[str, ResolvedWrapper | str] = {}
    for name in sorted(inner_wrapper_names(), key=lambda name: (len(name), name)):
        try:
            resolved[name] = resolve_inner_wrapper(name)
        except ContextParallelError as error:
            resolved[name] = str(error)
    return {
        fqn: [_judge(name, wrapper, module, fqn, cp_size=cp_size, device=device) for name, wrapper in resolved.items()]
        for fqn, module in boundaries.items()
    }


def _judge(
    name: str,
    wrapper: ResolvedWrapper | str,
    module: torch.nn.Module,
    fqn: str,
    *,
    cp_size: int,
    device: torch.device | None,
) -> MethodVerdict:
    if isinstance(wrapper, str):
        return MethodVerdict(wrapper=name, reason=wrapper)
    try:
        checked = check_method(wrapper, module, fqn, cp_size=cp_size, device=device)
    except ContextParallelError as error:
        return MethodVerdict(wrapper=name, reason=str(error))
    return MethodVerdict(wrapper=name, strategy=checked.strategy, shape=checked.shape)
