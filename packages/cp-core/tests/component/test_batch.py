"""The batch contract on several ranks: shards are the whole batch cut, and what is no whole batch is refused.

B batch, S real global length, C ranks.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from cp_core import InvalidInputError, UnsupportedError, shard_batch_for_cp, unshard_sequence

LENGTHS = (8, 1, 7, 2, 9, 3, 16)
FIELDS = ("input_ids", "shift_labels", "position_ids", "loss_weights", "inputs_embeds")


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def batch_of(length: int) -> dict[str, torch.Tensor]:
    """Rows with no pads, pads at the right, pads at the left, and only pads."""
    ids = torch.arange(1, 4 * length + 1).view(4, length)
    place, half = torch.arange(length), length // 2
    mask = torch.stack([place >= 0, place <= half, place >= half, place < 0])
    weights = torch.rand(4, length, generator=torch.Generator().manual_seed(length))
    positions = torch.where(mask, (mask.cumsum(1) - 1), 1)
    return {
        "input_ids": ids,
        "labels": torch.where(mask, ids, -100),
        "attention_mask": mask,
        "position_ids": positions,
        "loss_weights": weights,
        "inputs_embeds": weights[..., None].expand(4, length, 3),
    }


def shards_of_every_size() -> list[dict[str, Any]]:
    found = []
    for cp_size in range(1, dist.get_world_size() + 1):
        mesh = DeviceMesh("cpu", list(range(cp_size)), mesh_dim_names=("cp",))
        if mesh.get_coordinate() is None:
            continue
        for length in LENGTHS:  # another length at each step, some shorter than C
            local = shard_batch_for_cp(batch_of(length), mesh)
            layout = local["cp_layout"]
            found.append(
                {
                    "cp_size": cp_size,
                    "length": length,
                    "local": {name: local[name] for name in FIELDS},
                    "others": sorted(local.keys() - FIELDS),
                    "keys": layout.key_padding,
                    "contiguous": all(local[name].is_contiguous() for name in FIELDS),
                    "global": {name: unshard_sequence(local[name], 1, mesh, layout) for name in FIELDS},
                }
            )
    return found


def test_shards_of_any_length_are_the_whole_batch_cut_into_equal_parts(worlds: Any) -> None:
    ranks = worlds(4).run(shards_of_every_size)
    for cp_size in (1, 2, 3, 4):
        for length in LENGTHS:
            shards = [f for rank in ranks for f in rank if (f["cp_size"], f["length"]) == (cp_size, length)]
            assert len(shards) == cp_size
            whole = shard_batch_for_cp(batch_of(length), None, multiple_of=cp_size)
            unpadded = shard_batch_for_cp(batch_of(length), None)
            for name in FIELDS:
                assert torch.equal(torch.cat([shard["local"][name] for shard in shards], dim=1), whole[name]), name
                assert len({shard["local"][name].shape for shard in shards}) == 1
                assert all(torch.equal(shard["global"][name], unpadded[name]) for shard in shards), name
            for shard in shards:
                assert shard["others"] == ["cp_layout"]
                assert shard["contiguous"]
                assert torch.equal(shard["keys"], whole["cp_layout"].key_padding)


def embedding_gradients() -> torch.Tensor | None:
    mesh = cp_mesh()
    embeds = torch.ones(2, 7, 3, requires_grad=True)
    local = shard_batch_for_cp({"inputs_embeds": embeds}, mesh)["inputs_embeds"]
    (local * (dist.get_rank() + 1)).sum().backward()
    return embeds.grad


@pytest.mark.parametrize("cp", [2, 4])
def test_the_gradient_of_whole_embeddings_is_this_ranks_at_its_own_tokens_and_zero_elsewhere(
    worlds: Any, cp: int
) -> None:
    local_length = -(-7 // cp)
    for rank, grad in enumerate(worlds(cp).run(embedding_gradients)):
        owned = (torch.arange(7) // local_length == rank)[None, :, None]
        assert torch.equal(grad, (owned * (rank + 1.0)).expand(2, 7, 3))


def refusal(batch: Mapping[str, Any], mesh: DeviceMesh, **options: Any) -> str:
    try:
        shard_batch_for_cp(batch, mesh, **options)
    except (InvalidInputError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def batches_that_are_no_whole_ones() -> dict[str, str]:
    mesh, rank = cp_mesh(), dist.get_rank()
    ids = torch.arange(16).view(2, 8)
    mask = torch.ones(2, 8, dtype=torch.int64)
    own = slice(4 * rank, 4 * rank + 4)
    resharded = shard_batch_for_cp({"input_ids": ids, "labels": ids}, mesh)
    resharded.pop("cp_layout")
    constant = torch.zeros(1, 4, dtype=torch.int64)
    replicated = DTensor.from_local(ids, mesh, [Replicate()])
    return {
        "the whole batch": refusal({"input_ids": ids, "labels": ids}, mesh),
        "ids of a shard": refusal({"input_ids": ids[:, own]}, mesh),
        "embeddings of a shard": refusal({"inputs_embeds": ids[:, own, None].float()}, mesh),
        "positions of a shard": refusal(
            {"input_ids": constant, "position_ids": torch.arange(4)[None] + 4 * rank}, mesh
        ),
        "labels of a shard": refusal({"input_ids": constant, "labels": ids[:1, own]}, mesh),
        "weights of a shard": refusal(
            {"input_ids": constant, "labels": constant, "loss_weights": ids[:1, own].float()}, mesh
        ),
        "a mask of a shard": refusal({"input_ids": ids, "attention_mask": mask[:, own]}, mesh),
        "pads on one rank": refusal({"input_ids": ids, "attention_mask": mask.tril(7 - rank)}, mesh),
        "a shard once more": refusal(resharded, mesh),
        "a field on one rank": refusal({"input_ids": ids, **({"labels": ids} if rank else {})}, mesh),
        "another multiple": refusal({"input_ids": ids}, mesh, multiple_of=1 + 2 * rank),
        "a tensor of DTensor": refusal({"input_ids": replicated}, mesh),
        "a tensor that passes, as DTensor": refusal({"input_ids": ids, "image_sizes": replicated[:, :3]}, mesh),
        "a fault on one rank": refusal({"input_ids": ids, "labels": ids.float() if rank else ids}, mesh),
    }


def test_what_is_no_whole_batch_is_refused_on_all_ranks_by_name(worlds: Any) -> None:
    differs = "InvalidInputError: every context-parallel rank must pass the same global batch, but rank 1 differs from "
    differs += "rank 0 in {}; read the same samples on all of them, and pass the batch before any sharding."
    expected = {
        "the whole batch": "accepted",
        "ids of a shard": differs.format("input_ids"),
        "embeddings of a shard": differs.format("inputs_embeds"),
        "positions of a shard": differs.format("position_ids"),
        "labels of a shard": differs.format("shift_labels"),
        "weights of a shard": differs.format("loss_weights"),
        "a mask of a shard": "InvalidInputError: attention_mask must be global, [B, S] = [2, 8], but got [2, 4], which "
        "is shorter than the tokens; a mask of a local shard is not accepted.",
        "pads on one rank": differs.format("attention_mask"),
        "a shard once more": differs.format("input_ids, position_ids, shift_labels"),
        "a field on one rank": differs.format("shift_labels"),
        "another multiple": differs.format("the multiple it is padded to"),
        "a tensor of DTensor": "UnsupportedError: input_ids is a DTensor, but the batch contract cuts plain tensors; "
        "pass the global batch as full tensors.",
        "a tensor that passes, as DTensor": "UnsupportedError: image_sizes is a DTensor, but the batch contract cuts "
        "plain tensors; pass the global batch as full tensors.",
        "a fault on one rank": "InvalidInputError: rank 1: labels must be a tensor of integers, but got torch.float32.",
    }
    for found in worlds(2).run(batches_that_are_no_whole_ones):
        assert found == expected
