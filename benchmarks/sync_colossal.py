"""How much work and time the local attention of Colossal takes per rank, in paired runs on one thread.

    python benchmarks/sync_colossal.py [--repeats 5] [--dtype float32]

Two comparisons, forward and backward together, the minimum over the repeats of each side:

- S = 8192, C = 4: against unmasked attention of as many query-key pairs as the rank's queries see.
- 4096 tokens per rank, C = 2: against attention over the gathered keys with a dense mask.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from cp_core import AllGatherStrategy, AttentionMeta, AttentionShape, SequenceLayout, local_attention
from cp_core.cost import attention_cost

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64


class Rank(NamedTuple):
    """What one rank holds after the gather."""

    layout: SequenceLayout
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_rank(length: int, cp_size: int, rank: int, dtype: torch.dtype) -> Rank:
    generator = torch.Generator().manual_seed(0)
    layout = SequenceLayout.contiguous(global_length=length, multiple_of=cp_size, cp_size=cp_size, cp_rank=rank)
    shapes = [(NUM_Q_HEADS, layout.local_length), (NUM_KV_HEADS, length), (NUM_KV_HEADS, length)]
    tensors = [torch.randn(1, heads, rows, HEAD_DIM, generator=generator).to(dtype) for heads, rows in shapes]
    return Rank(layout, *(tensor.requires_grad_() for tensor in tensors))


def ours(rank: Rank) -> torch.Tensor:
    return local_attention(rank.q, rank.k, rank.v, attention_meta=AttentionMeta(layout=rank.layout))


def dense(rank: Rank) -> torch.Tensor:
    visible = rank.layout.global_index[:, None] >= torch.arange(rank.k.shape[2])
    return scaled_dot_product_attention(rank.q, rank.k, rank.v, visible, enable_gqa=True)


def unmasked(rank: Rank, num_pairs: int) -> Callable[[], torch.Tensor]:
    num_keys = round(num_pairs / NUM_Q_HEADS / rank.layout.local_length)
    k, v = (t.detach()[:, :, :num_keys].clone().requires_grad_() for t in (rank.k, rank.v))
    return lambda: scaled_dot_product_attention(rank.q, k, v, enable_gqa=True)


def seconds(attend: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    output = attend()
    output.backward(torch.ones_like(output))
    return time.perf_counter() - start


def paired(one: Callable[[], torch.Tensor], other: Callable[[], torch.Tensor], repeats: int) -> tuple[float, float]:
    runs = [(seconds(one), seconds(other)) for _ in range(repeats + 1)][1:]  # the first warms up
    return min(run[0] for run in runs), min(run[1] for run in runs)


def against_visible_pairs(dtype: torch.dtype, repeats: int) -> None:
    times, scored, visible = [], 0, 0
    for index in range(4):
        rank = make_rank(8192, 4, index, dtype)
        shape = AttentionShape(
            num_q_heads=NUM_Q_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=dtype,
            device=rank.q.device,
            fqn="attention",
        )
        cost = attention_cost(AllGatherStrategy(), shape=shape, layout=rank.layout, batch_size=1, cp_size=4)
        scored, visible = scored + cost.scored_entries, visible + cost.visible_entries
        times.append(paired(lambda rank=rank: ours(rank), unmasked(rank, cost.visible_entries), repeats))
    ratio = sum(mine for mine, _ in times) / sum(theirs for _, theirs in times)
    each = ", ".join(f"{mine / theirs:.2f}" for mine, theirs in times)
    print(f"S 8192, C 4: scored / visible pairs {scored / visible:.3f}; time {ratio:.3f} of unmasked ({each})")


def against_a_dense_mask(dtype: torch.dtype, repeats: int) -> None:
    ranks = [make_rank(8192, 2, index, dtype) for index in range(2)]
    times = [paired(lambda rank=rank: ours(rank), lambda rank=rank: dense(rank), repeats) for rank in ranks]
    slowest = max(mine for mine, _ in times) / max(theirs for _, theirs in times)
    mean = sum(mine for mine, _ in times) / sum(theirs for _, theirs in times)
    print(f"4096 tokens per rank, C 2: slowest rank {slowest:.3f} of a dense mask, mean of ranks {mean:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    against_visible_pairs(dtype, options.repeats)
    against_a_dense_mask(dtype, options.repeats)


if __name__ == "__main__":
    main()
