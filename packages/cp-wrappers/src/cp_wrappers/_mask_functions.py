"""Reading the mask functions of transformers: what a model asks of its attention, without making a mask.

transformers hands its mask interface a function of query and key index, put together from a few parts of its own. Only
a combination that is fully understood is read; of anything else the reader says that it does not know it.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

MaskFunction = Callable[..., Any]

_MODULE = "transformers.masking_utils"
_CAUSAL = (
    {"causal_mask_function"},
    {"causal_mask_function", "sliding_window_overlay.<locals>.inner_mask"},
)
_DOCUMENTS = "packed_sequence_mask_function.<locals>.inner_mask"


def is_plainly_causal(mask_function: MaskFunction) -> bool:
    """Whether a query sees itself and all earlier keys, at most with a window, and documents only pads would make.

    A window is the business of each layer, which hands it to its attention. Pads at the left may hold positions of 0
    before the real ones count up, which transformers takes for documents of one token.
    """
    parts = {_name(part): part for part in _parts(mask_function)}
    packed = parts.pop(_DOCUMENTS, None)
    if set(parts) not in _CAUSAL:
        return False
    return packed is None or _holds_leading_pads_only(_nonlocals(packed)["packed_sequence_mask"])


def _parts(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    """Yield the parts of which a query must satisfy each."""
    name = _name(mask_function)
    if name == "and_masks.<locals>.and_mask":
        for part in _nonlocals(mask_function)["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        # Inside a run of positions that count up, differences of positions are differences of indices.
        yield from _parts(_nonlocals(mask_function)["mask_function"])
    else:
        yield mask_function


def _name(function: MaskFunction) -> str | None:
    known = getattr(function, "__module__", None) == _MODULE
    return getattr(function, "__qualname__", None) if known else None


def _nonlocals(function: MaskFunction) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)


def _holds_leading_pads_only(documents: torch.Tensor) -> bool:
    """Whether each row is documents of one token each, and one of all the others.

    Args:
        documents: `[B, L]`, the number of each token's document.
    """
    last = documents == documents[:, -1:]
    before = documents == torch.arange(documents.shape[1], device=documents.device)
    return bool((last | before).all())
