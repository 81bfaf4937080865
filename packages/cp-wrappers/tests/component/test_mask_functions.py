"""What a model of transformers asks of its mask is understood, or it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils as masks

from cp_wrappers._mask_functions import is_plainly_causal

WINDOW = masks.sliding_window_causal_mask_function(4)
CAUSAL = masks.causal_mask_function


def packed(positions: list[list[int]], of: Callable[..., Any] = CAUSAL) -> Callable[..., Any]:
    """Return what transformers makes of positions that do not count up by one."""
    position_ids = torch.tensor(positions)
    documents = masks.find_packed_sequence_indices(position_ids)
    assert documents is not None
    remapped = masks.remap_positions_for_packed_sequence(of, position_ids)
    return masks.and_masks(remapped, masks.packed_sequence_mask_function(documents))


PLAIN = {
    "causal": CAUSAL,
    "a window": WINDOW,
    "left pads at position 0": packed([[0, 0, 0, 1, 2], [7, 8, 9, 10, 11]]),
    "a shard of pads": packed([[0, 0, 0, 0], [0, 0, 1, 2]]),
    "left pads and a window": packed([[0, 0, 1, 2]], WINDOW),
}
OTHERS = {
    "two documents": packed([[0, 1, 2, 0, 1]]),
    "two documents in one row of two": packed([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]),
    "a last document of one token": packed([[3, 4, 5, 0]]),
    "two documents after a pad": packed([[0, 0, 1, 0, 1]]),
    "two documents and a window": packed([[0, 1, 0, 1]], WINDOW),
    "full": masks.bidirectional_mask_function,
    "chunks": masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
    "a window on both sides": masks.sliding_window_bidirectional_mask_function(4),
    "a prefix": masks.or_masks(CAUSAL, masks.blockwise_overlay(torch.zeros(1, 4, dtype=torch.int64))),
    "a window without causality": masks.sliding_window_overlay(4),
    "pads of its own": masks.and_masks(CAUSAL, masks.padding_mask_function(torch.ones(1, 4, dtype=torch.bool))),
    "a user's own": lambda batch, head, query, key: key <= query,
    "causal and a user's own": masks.and_masks(CAUSAL, lambda batch, head, query, key: key != 3),
}


@pytest.mark.parametrize("mask_function", PLAIN.values(), ids=PLAIN.keys())
def test_causality_windows_and_left_pads_are_understood(mask_function: Callable[..., Any]) -> None:
    assert is_plainly_causal(mask_function)


@pytest.mark.parametrize("mask_function", OTHERS.values(), ids=OTHERS.keys())
def test_anything_else_is_not(mask_function: Callable[..., Any]) -> None:
    assert not is_plainly_causal(mask_function)
