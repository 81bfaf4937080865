"""How the gradients of a model are joined over ranks: summed once, in whatever mesh, and clipped by one norm.

A gradient is that of the whole batch when it has been summed over data and context parallel (the ranks hold different
tokens), and, for the few parameters that tensor-parallel ranks feed with different parts, over tensor parallel too.
FSDP sums what it shards by itself; the rest is summed here.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cp_collectives import gather_objects
from cp_core import InvalidInputError, clip_grad_norm, sum_gradients, tensor_digest

from ._mesh import MeshContext
from ._tensor_parallel import TpGradInfo, sum_tp_gradients


class GradientDomain:
    """The gradients of one model.

    Args:
        model: The model in its last form: after tensor parallelism, context parallelism and FSDP.
        meshes: The meshes of the run.
        tp_grad_info: The parameters of whose gradient each tensor-parallel rank finds a part.
    """

    def __init__(self, model: torch.nn.Module, meshes: MeshContext, tp_grad_info: TpGradInfo) -> None:
        self._model, self._meshes, self._tp_grad_info = model, meshes, tp_grad_info
        self._known = {id(param) for param in model.parameters()}

    @property
    def partial_names(self) -> tuple[str, ...]:
        """Names of the parameters that are summed over tensor-parallel ranks."""
        return tuple(self._tp_grad_info)

    def will_reduce(self, reduces: bool) -> None:
        """Say before a backward whether it is the last of the step, after which FSDP sums; before, it accumulates."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(reduces)

    def reduce(self) -> None:
        """Make each gradient that of the whole batch; once per step, after its last backward.

        Raises:
            InvalidInputError: If a parameter was added since the model was built and ranks started it differently.
        """
        self._meet_new_parameters()
        sum_gradients(self._summed_here(), self._meshes.dp_cp_mesh)
        sum_tp_gradients(self._model, self._tp_grad_info, self._meshes.tp_mesh)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale gradients down to a total norm; return the norm before, 0-d, equal on all ranks."""
        return clip_grad_norm(self._model.parameters(), max_norm)

    def _summed_here(self) -> list[torch.nn.Parameter]:
        shard_ranks = set(_ranks_of(self._meshes.dp_cp_mesh))
        sharded = isinstance(self._model, FSDPModule)
        return [p for p in self._model.parameters() if not (sharded and _is_sharded_over(p, shard_ranks))]

    def _meet_new_parameters(self) -> None:
        """Check parameters that came after the build, such as adapters: sums keep equal only what starts equal."""
        new = {n: p for n, p in self._model.named_parameters() if p.requires_grad and id(p) not in self._known}
        digests = gather_objects({n: tensor_digest(_whole(p)) for n, p in new.items()}, mesh=self._meshes.world_mesh)
        for rank, other in enumerate(digests):
            differing = [name for name in {**digests[0], **other} if digests[0].get(name) != other.get(name)]
            if differing:
                raise InvalidInputError(
                    f"{len(differing)} parameters that were added after the trainer was built differ between ranks 0 "
                    f"and {rank}, first {differing[0]}; add and initialize them alike on all ranks, in build_model."
                )
        self._known |= {id(param) for param in new.values()}


def _is_sharded_over(param: torch.nn.Parameter, ranks: set[int]) -> bool:
    return isinstance(param, DTensor) and len(ranks.intersection(_ranks_of(param.device_mesh))) > 1


def _whole(param: torch.nn.Parameter) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks
