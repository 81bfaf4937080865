"""What joins gradients beyond parity of whole runs: dtypes on every axis, late parameters, unused parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cp_collectives import current_platform
from cp_core import InvalidInputError
from cp_trainer_glue import MeshContext
from cp_trainer_glue._config import AcceleratorConfig, FsdpConfig
from cp_trainer_glue._gradient_domain import GradientDomain
from cp_trainer_glue._sharded_parameters import shard_parameters


def meshes_of(**sizes: int) -> MeshContext:
    platform = current_platform("cpu")
    return MeshContext.build(AcceleratorConfig(**sizes), platform, platform.device(0))


def whole(tensor: torch.Tensor | None) -> list[float] | None:
    if tensor is None:
        return None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    found: list[float] = full.flatten().tolist()
    return found


# --- meshes ---------------------------------------------------------------------------------------------------------


def fsdp_mesh_of(sizes: dict[str, int]) -> tuple[tuple[str, ...] | None, list[Any]]:
    mesh = meshes_of(**sizes).fsdp_mesh
    return mesh.mesh_dim_names, mesh.mesh.tolist()


@pytest.mark.parametrize(
    ("sizes", "names", "ranks"),
    [
        ({"dp_shard_size": 2, "cp_size": 2}, ("dp_shard_cp",), [0, 1, 2, 3]),
        ({"cp_size": 4}, ("dp_shard_cp",), [0, 1, 2, 3]),
        ({"dp_replicate_size": 2, "cp_size": 2}, ("dp_replicate", "dp_shard_cp"), [[0, 1], [2, 3]]),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, ("dp_replicate", "dp_shard_cp"), [[0, 1], [2, 3]]),
    ],
    ids=["shards and cp", "cp alone", "replicas of cp", "replicas of shards"],
)
def test_shards_and_cp_are_one_axis_and_never_replicas(worlds: Any, sizes: Any, names: Any, ranks: Any) -> None:
    assert worlds(4).run(fsdp_mesh_of, sizes) == [(names, ranks)] * 4


# --- dtypes ---------------------------------------------------------------------------------------------------------


def bf16_sum(sizes: dict[str, int], reduce_dtype: str | None) -> list[float] | None:
    """Sum a gradient of 256 on rank 0 and 1 elsewhere: in bf16 each added 1 would be lost, on whatever axis."""
    meshes = meshes_of(**sizes)
    model = torch.nn.Linear(1, 4, bias=False)
    if reduce_dtype is None:
        model = model.to(torch.bfloat16)
    else:
        config = FsdpConfig.model_validate({"param_dtype": "bfloat16", "reduce_dtype": reduce_dtype})
        shard_parameters(model, meshes.fsdp_mesh, config)
    domain = GradientDomain(model, meshes, {})
    domain.will_reduce(True)
    value = 256.0 if dist.get_rank() == 0 else 1.0
    model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    domain.reduce()
    return whole(model.weight.grad)


REPLICAS, SHARDS = {"dp_replicate_size": 2, "cp_size": 2}, {"dp_shard_size": 2, "cp_size": 2}


@pytest.mark.parametrize("sizes", [REPLICAS, SHARDS], ids=["hsdp", "fsdp"])
def test_reduce_dtype_holds_on_every_axis(worlds: Any, sizes: dict[str, int]) -> None:
    assert worlds(4).run(bf16_sum, sizes, "float32") == [[259.0] * 4] * 4
    assert worlds(4).run(bf16_sum, sizes, "bfloat16") != [[259.0] * 4] * 4


def test_replicated_bf16_gradients_are_summed_in_fp32(worlds: Any) -> None:
    assert worlds(4).run(bf16_sum, REPLICAS, None) == [[260.0] * 4] * 4  # 259 rounded once, to bf16


def bf16_accumulation(steps: int) -> list[float] | None:
    meshes = meshes_of(cp_size=2)
    model = torch.nn.Linear(1, 2, bias=False)
    shard_parameters(model, meshes.fsdp_mesh, FsdpConfig(param_dtype="bfloat16", reduce_dtype="float32"))
    domain = GradientDomain(model, meshes, {})
    for step in range(steps):
        domain.will_reduce(step == steps - 1)
        model(torch.full((1, 1), 256.0 if step == 0 else 1.0, dtype=torch.bfloat16)).sum().backward()
    domain.reduce()
    return whole(model.weight.grad)


def test_micro_batches_accumulate_in_reduce_dtype(worlds: Any) -> None:
    assert worlds(2).run(bf16_accumulation, 4) == [[2 * 259.0] * 2] * 2


# --- parts that some ranks do not use, and parameters that come late -------------------------------------------------


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor, *, branch: bool) -> torch.Tensor:
        out: torch.Tensor = self.always(hidden)
        return out + self.sometimes(hidden) if branch else out


def unused_on_rank_1(sharded: bool) -> dict[str, Any]:
    meshes = meshes_of(cp_size=2)
    torch.manual_seed(0)
    model = Branches()
    if sharded:
        shard_parameters(model, meshes.fsdp_mesh, FsdpConfig())
    domain = GradientDomain(model, meshes, {})
    model(torch.ones(1, 2), branch=dist.get_rank() == 0).sum().backward()
    domain.reduce()
    return {name: whole(param.grad) for name, param in model.named_parameters()}


@pytest.mark.parametrize("sharded", [False, True], ids=["none", "fsdp"])
def test_a_branch_that_one_rank_does_not_use_counts_as_zero_there(worlds: Any, sharded: bool) -> None:
    for found in worlds(2).run(unused_on_rank_1, sharded):
        assert found["always.weight"] == [2.0] * 4
        assert found["sometimes.weight"] == [1.0] * 4
        assert found["never.weight"] in (None, [0.0] * 4)  # FSDP sums zeros, since it cannot know of the other ranks


def late_parameter(sharded: bool, make: Callable[[], torch.Tensor]) -> list[float] | None:
    meshes = meshes_of(cp_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2, bias=False)
    if sharded:
        shard_parameters(model, meshes.fsdp_mesh, FsdpConfig())
    domain = GradientDomain(model, meshes, {})
    model.adapter = torch.nn.Parameter(make())
    hidden = torch.full((1, 2), 1.0 + dist.get_rank())
    (model(hidden) + hidden * model.adapter).sum().backward()
    domain.reduce()
    return whole(model.adapter.grad)


def ones() -> torch.Tensor:
    return torch.ones(2)


def other_on_each_rank() -> torch.Tensor:
    return torch.full((2,), float(dist.get_rank()))


@pytest.mark.parametrize("sharded", [False, True], ids=["none", "fsdp"])
def test_a_parameter_that_comes_late_is_summed_too(worlds: Any, sharded: bool) -> None:
    assert worlds(2).run(late_parameter, sharded, ones) == [[3.0, 3.0]] * 2


def refused_late_parameter() -> str:
    with pytest.raises(InvalidInputError) as caught:
        late_parameter(False, other_on_each_rank)
    return str(caught.value)


def test_a_late_parameter_must_start_equal_on_all_ranks(worlds: Any) -> None:
    for message in worlds(2).run(refused_late_parameter):
        assert message == (
            "1 parameters that were added after the trainer was built differ between ranks 0 and 1, first adapter; add "
            "and initialize them alike on all ranks, in build_model."
        )


# --- messages -------------------------------------------------------------------------------------------------------


def messages_of_accumulation() -> list[bool]:
    """Return for each of three micro-batches whether its backward left a summed gradient."""
    meshes = meshes_of(cp_size=2)
    model = torch.nn.Linear(2, 2, bias=False)
    shard_parameters(model, meshes.fsdp_mesh, FsdpConfig())
    assert isinstance(model, FSDPModule)
    domain, summed = GradientDomain(model, meshes, {}), []
    for step in range(3):
        domain.will_reduce(step == 2)
        model(torch.ones(1, 2)).sum().backward()
        summed.append(model.weight.grad is not None)
    return summed


def test_fsdp_sums_once_per_window(worlds: Any) -> None:
    assert worlds(2).run(messages_of_accumulation) == [[False, False, True]] * 2
