"""The repeated blocks of a model: what is recomputed, compiled and sharded as one piece."""

import torch

from cp_wrappers import find_attention_boundaries


def transformer_blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the blocks of a model by name, in the model's order.

    A block is the outermost member of a `ModuleList` that holds an attention; an attention outside of any list is a
    block by itself.

    Args:
        model: The model, wrapped or not.
    """
    modules = dict(model.named_modules())
    attentions = {id(module) for module in find_attention_boundaries(model).values()}
    names = [name for name, module in modules.items() if id(module) in attentions]
    blocks = dict.fromkeys(_block_of(name, modules) for name in names)
    return {name: modules[name] for name in blocks}


def _block_of(name: str, modules: dict[str, torch.nn.Module]) -> str:
    parts = name.split(".")
    for length in range(1, len(parts)):
        if isinstance(modules[".".join(parts[:length])], torch.nn.ModuleList):
            return ".".join(parts[: length + 1])
    return name
