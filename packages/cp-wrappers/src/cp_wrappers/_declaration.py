"""What a user declares of an attention, and what is planned for one."""

from dataclasses import dataclass

import torch

from cp_core import AttentionShape, ContextParallelStrategy, InvalidInputError

from ._registry import ResolvedWrapper, WrapperDeclaration, resolve_inner_wrapper, resolve_local_compute_fn


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodDeclaration:
    """One declaration: a pattern of module names and the method of the attentions it reaches.

    Exactly one of `inner_wrapper` and `local_compute_fn` names the method.
    """

    # fnmatch on the module name; `*` crosses dots. The model itself has the empty name.
    match: str
    # The attention, relative to the matched module; "self" is that module. None: the only attention in it.
    inner_target: str | None = None
    # Wraps the attention's forward: a name, a mapping with `_target_`, or a decorated function.
    inner_wrapper: WrapperDeclaration | None = None
    # Takes the attention's place: a path, a mapping with `_target_`, or a factory.
    local_compute_fn: WrapperDeclaration | None = None
    # Where it stands, for messages; for example "plan_overrides.0".
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            raise InvalidInputError(f"match must be a pattern such as '*.self_attn', but is {self.match!r}.")
        if self.inner_target is not None and not (isinstance(self.inner_target, str) and self.inner_target):
            raise InvalidInputError(
                f"inner_target must be 'self' or a name inside the match, but is {self.inner_target!r}."
            )

    @property
    def label(self) -> str:
        """The declaration in a sentence."""
        return f"{self.source} ({self.match!r})" if self.source else f"the declaration {self.match!r}"

    def resolve(self) -> ResolvedWrapper:
        """Find the declared function and check its data; exactly one of the two channels is set.

        Raises:
            InvalidInputError: As `resolve_inner_wrapper` and `resolve_local_compute_fn`.
        """
        if self.local_compute_fn is not None:
            return resolve_local_compute_fn(self.local_compute_fn)
        if self.inner_wrapper is None:
            raise AssertionError(f"{self.label} has no method to resolve.")
        return resolve_inner_wrapper(self.inner_wrapper)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryPlan:
    """What one attention will get."""

    fqn: str
    module: torch.nn.Module
    declaration: MethodDeclaration
    wrapper: ResolvedWrapper
    # None for a method with communication of its own.
    strategy: ContextParallelStrategy | None
    # The heads that a strategy works on; None where there is no strategy, or they show at the first forward only.
    shape: AttentionShape | None
    # The attentions that the boundary stands for: the module itself, one that it holds, or one that holds it.
    attentions: tuple[torch.nn.Module, ...]

    @property
    def match(self) -> str:
        """The pattern that declared it."""
        return self.declaration.match
