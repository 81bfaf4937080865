"""Each differentiable collective against its numerical Jacobian, in float64, on all ranks together.

Every rank perturbs the same stacked input in lock step and takes its own part of it; what the ranks' backwards give is
summed over ranks and divided by their number, since each rank sends the same gradient of the same gathered output back.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_collectives import all_gather_sequence, flex_cp_allgather, launch_all_gather
from cp_collectives.testing import mean_gradient_over_ranks

Collective = Callable[[torch.Tensor, torch.Tensor, DeviceMesh], tuple[torch.Tensor, ...]]

COLLECTIVES: dict[str, Collective] = {
    "all_gather_sequence": lambda k, v, mesh: all_gather_sequence(k, v, dim=1, mesh=mesh),
    "all_gather_sequence, reduce-scatter": lambda k, v, mesh: all_gather_sequence(
        k, v, dim=1, mesh=mesh, reduction="reduce_scatter"
    ),
    "flex_cp_allgather": lambda k, v, mesh: flex_cp_allgather(k, v, cp_dim=1, cp_mesh=mesh),
    "launch_all_gather": lambda k, v, mesh: launch_all_gather(k, v, dim=1, mesh=mesh).wait(),
}


def jacobian_is_right(name: str, broken: bool) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    generator = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(mesh.size(), 1, 2, width, dtype=torch.float64, generator=generator).requires_grad_()
        for width in (2, 1)
    )

    def gathered(all_k: torch.Tensor, all_v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        local = (mean_gradient_over_ranks(stacked)[dist.get_rank()] for stacked in (all_k, all_v))
        outputs = COLLECTIVES[name](*local, mesh)
        return tuple(output + broken * output.detach() for output in outputs)

    return torch.autograd.gradcheck(gathered, (k, v), raise_exception=False)


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_jacobian_is_the_numerical_one(worlds: Any, name: str, cp: int) -> None:
    assert worlds(cp).run(jacobian_is_right, name, False) == [True] * cp


def test_a_wrong_gradient_is_seen(worlds: Any) -> None:
    assert worlds(2).run(jacobian_is_right, "all_gather_sequence", True) == [False] * 2
