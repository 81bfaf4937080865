"""A plain PyTorch loop with context parallelism from cp-core alone, on this file's own text.

torchrun --standalone --nproc-per-node 2 examples/plain_loop.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from cp_core import AllGatherStrategy, AttentionMeta, count_valid_tokens, mean_global_loss, sum_gradients


def train(cp_mesh: dist.DeviceMesh, num_steps: int) -> tuple[list[float], torch.nn.ModuleList]:
    strategy = AllGatherStrategy()
    torch.manual_seed(0)  # the same model on every rank
    sizes = {"tokens": (256, 32), "places": (512, 32), "qkv": (32, 96), "head": (32, 256)}
    tokens, places = (torch.nn.Embedding(*sizes[name]) for name in ("tokens", "places"))
    qkv, head = (torch.nn.Linear(*sizes[name]) for name in ("qkv", "head"))
    model = torch.nn.ModuleList([tokens, places, qkv, head])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    text = torch.tensor(list(Path(__file__).read_bytes()))
    for step in range(num_steps):
        ids = text[step * 7 :][None, : 101 + step]  # the same global batch on every rank, of any length
        batch = strategy.shard_batch({"input_ids": ids, "labels": ids}, cp_mesh)
        x = tokens(batch["input_ids"]) + places(batch["position_ids"])
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in qkv(x).chunk(3, dim=2))  # [B, N, L, D]
        meta = AttentionMeta(layout=batch["cp_layout"])
        x = x + strategy.attention(q, k, v, cp_mesh=cp_mesh, attention_meta=meta).transpose(1, 2).flatten(2)
        targets = batch["shift_labels"].flatten()
        loss_sum = cross_entropy(head(x).flatten(0, 1), targets, reduction="sum")
        loss = mean_global_loss(loss_sum, count_valid_tokens(targets), dp_cp_mesh=cp_mesh, grad_average_degree=1)
        optimizer.zero_grad()
        loss.backward.backward()
        sum_gradients(model.parameters(), cp_mesh)
        optimizer.step()
        losses.append(loss.logged.item())
    return losses, model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, _ = train(dist.init_device_mesh("cpu", (dist.get_world_size(),)), num_steps=20)
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()
