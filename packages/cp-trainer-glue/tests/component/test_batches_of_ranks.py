"""Ranks that share a computation must be given the same batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_core import InvalidInputError
from cp_trainer_glue._data import require_same_shard


def check(different: bool) -> str | None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids = torch.arange(4) + (dist.get_rank() if different else 0)
    shard = {"input_ids": ids, "shift_labels": torch.arange(4), "cp_layout": object()}
    if not different:
        require_same_shard(shard, mesh)
        return None
    with pytest.raises(InvalidInputError) as caught:
        require_same_shard(shard, mesh)
    return str(caught.value)


def test_tensor_parallel_ranks_must_read_the_same_batch(worlds: Any) -> None:
    assert worlds(2).run(check, False) == [None, None]
    for message in worlds(2).run(check, True):
        assert message == (
            "tensor-parallel ranks must read the same batch, but rank 1 differs from rank 0 in input_ids; let "
            "build_data depend on meshes.dp_rank alone."
        )
