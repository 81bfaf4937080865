"""Parameters that a model uses in fp32 though they are float64, as norms do that cast their weight: what rounding adds.

Their gradient is summed over tokens in fp32, on one device in another order than over ranks.
"""

from collections.abc import Iterator, Mapping

import torch

# Of a gradient that is summed in fp32: 100 roundings of 6e-8.
FP32_SUM = 6e-6
_CAST = "ToCopyBackward0"


def used_in_fp32(loss: torch.Tensor, named: Mapping[str, torch.nn.Parameter]) -> set[str]:
    """Return the names of float64 parameters that a loss was computed from through a cast.

    Args:
        loss: With its graph, before backward.
        named: Parameters by name.
    """
    names = {id(p): name for name, p in named.items() if p.dtype == torch.float64}
    return {names[id(p)] for p in _cast_leaves(loss) if id(p) in names}


def _cast_leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves of a graph that pass a cast first."""
    waiting, seen = [loss.grad_fn], set[object]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [other for other, _ in node.next_functions if other is not None]
        if node.name() == _CAST:
            yield from (leaf for other in following if (leaf := getattr(other, "variable", None)) is not None)
        waiting += following
