"""The modules of a model by the names a user knows, whatever was wrapped around the model since.

torch.compile, activation checkpointing, FSDP, DDP and PEFT each put a module of their own around the user's:
`base_model.model.model.layers.0.self_attn` is still `model.layers.0.self_attn` to the person who declared it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

# Attributes that only a wrapper has, naming the module it stands for.
_HELD_BY_ANY = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# Class of a wrapper -> the attribute with the module it stands for; by name, so that none of them has to be installed.
_HELD_BY_CLASS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "PeftModel": "base_model",
    "PeftMixedModel": "base_model",
    "BaseTuner": "model",
}
# PEFT keeps the original beside the copy that it trains, and runs the copy.
_SAVED_BY_PEFT = "ModulesToSaveWrapper"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleNames:
    """Every module of a model by its user's name, in the model's order."""

    modules: dict[str, torch.nn.Module]
    # What else a module is called -> its user's name: names in `named_modules()`, and those it is shared under.
    other_names: dict[str, str]

    @classmethod
    def of(cls, model: torch.nn.Module) -> "ModuleNames":
        """Return the names of a model's modules; a wrapper and what it stands for share one, which means the latter."""
        first: dict[int, str] = {}
        modules: dict[str, torch.nn.Module] = {}
        other_names: dict[str, str] = {}
        for name, full_name, module in _walk(model, "", "", ()):
            known = first.setdefault(id(module), name)
            if known == name:
                modules[name] = module
            other_names |= {other: known for other in (name, full_name) if other != known}
        return cls(modules=modules, other_names=other_names)

    def matching(self, pattern: str) -> list[str]:
        """Return the user's names that an fnmatch pattern matches, by any name; `*` crosses dots."""
        matched = {name for name in self.modules if fnmatchcase(name, pattern)}
        matched |= {name for other, name in self.other_names.items() if fnmatchcase(other, pattern)}
        return [name for name in self.modules if name in matched]

    def named(self, name: str) -> str | None:
        """Return the user's name of the module that has this name, None if there is none."""
        return name if name in self.modules else self.other_names.get(name)


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is another one or stands inside it, by name."""
    return name == outer or outer == "" or name.startswith(f"{outer}.")


def are_related(name: str, other: str) -> bool:
    """Whether one of two modules is the other or stands inside it, by name."""
    return is_inside(name, other) or is_inside(other, name)


def joined(*parts: str) -> str:
    """Join parts of a module name; the model itself is the empty name."""
    return ".".join(part for part in parts if part)


def _walk(
    module: torch.nn.Module, name: str, full_name: str, above: tuple[int, ...]
) -> Iterator[tuple[str, str, torch.nn.Module]]:
    yield name, full_name, module
    for child_name, child, is_held in _children(module):
        if id(child) not in above:
            inner = name if is_held else joined(name, child_name)
            yield from _walk(child, inner, joined(full_name, child_name), (*above, id(module)))


def _children(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """Yield each child with its name, and whether `module` only stands for it."""
    if any(kind.__name__ == _SAVED_BY_PEFT for kind in type(module).__mro__):
        copies = module.get_submodule("modules_to_save")
        for name, child in copies.named_children():
            yield f"modules_to_save.{name}", child, len(list(copies.children())) == 1
        return
    held = _held_attribute(module)
    for name, child in module.named_children():
        yield name, child, name == held


def _held_attribute(module: torch.nn.Module) -> str | None:
    for attribute in _HELD_BY_ANY:
        if attribute in module._modules:
            return attribute
    classes = (_HELD_BY_CLASS.get(kind.__name__) for kind in type(module).__mro__)
    return next((attribute for attribute in classes if attribute in module._modules), None)
