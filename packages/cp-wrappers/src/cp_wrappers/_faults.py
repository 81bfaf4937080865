"""What is wrong with a declaration, collected so that a user sees everything at once."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cp_core import ContextParallelError, InvalidInputError, UnsupportedError

_NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, in a sentence."""

    message: str
    # Legal, and not supported.
    unsupported: bool = False


@dataclass(slots=True)
class Faults:
    """Collects faults; one that several modules share is said once, with the names of the others."""

    # By sentence without its module's name: the fault of the first module, and the names of the others.
    _found: dict[str, tuple[Fault, list[str]]] = field(default_factory=dict)

    def add(self, message: str, *, module: str = "", unsupported: bool = False) -> None:
        """Note a fault; `module` is the one its sentence names, if others may share it."""
        fault = Fault(message=message, unsupported=unsupported)
        alike = message.replace(module, "\0") if module else message
        first, others = self._found.setdefault(alike, (fault, []))
        if first is not fault and module and module not in others and first.message != message:
            others.append(module)

    @contextmanager
    def noted(self, module: str = "") -> Iterator[None]:
        """Note what the block refuses."""
        try:
            yield
        except ContextParallelError as error:
            self.add(str(error), module=module, unsupported=isinstance(error, UnsupportedError))

    def all(self) -> tuple[Fault, ...]:
        """Return all faults."""
        return tuple(
            Fault(message=fault.message + _also(others), unsupported=fault.unsupported)
            for fault, others in self._found.values()
        )


def _also(modules: Sequence[str]) -> str:
    return f" The same holds for {listed(modules)}." if modules else ""


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raise all faults as one error, if there are any.

    Raises:
        UnsupportedError: If each of them is legal, and not supported.
        InvalidInputError: Else.
    """
    if faults:
        kind = UnsupportedError if all(fault.unsupported for fault in faults) else InvalidInputError
        raise kind("\n".join(fault.message for fault in faults))


def named(name: str) -> str:
    """Return a module's name for a sentence; the model itself has none."""
    return name or "the model itself"


def listed(names: Iterable[str]) -> str:
    """Return names for a sentence; a long list is cut, and says so."""
    shown = list(names)
    more = len(shown) - _NAMES_SHOWN
    return ", ".join(map(named, shown[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
