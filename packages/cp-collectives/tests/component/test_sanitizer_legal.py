"""Programs that are right: the sanitizer refuses nothing of them, and changes no bit and no record."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from cp_collectives import CollectiveTrace, all_gather_sequence, all_reduce_sum, check_no_pending, launch_all_gather
from cp_collectives._message import Message
from cp_collectives._watch import watchers
from cp_collectives.testing import PendingBufferSanitizer


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


# --- programs -----------------------------------------------------------------------------------------------------


def gather_at_once(mesh: DeviceMesh) -> list[torch.Tensor]:
    k, v = normal(1, 2, 3, 4, seed=1), normal(1, 2, 3, 5, seed=2)
    global_k, global_v = all_gather_sequence(k, v, dim=2, mesh=mesh, layer="layers.0")
    return gradients(global_k.square().sum() * global_v.sin().sum(), k, v)


def reduce_natively(mesh: DeviceMesh) -> list[torch.Tensor]:
    k = normal(3, 4)
    (global_k,) = all_gather_sequence(k, dim=0, mesh=mesh, reduction="reduce_scatter")
    return gradients(global_k.square().sum(), k)


def gather_in_16_bit(mesh: DeviceMesh) -> list[torch.Tensor]:
    k = normal(1, 2, 3, 4, dtype=torch.bfloat16)
    (global_k,) = all_gather_sequence(k, dim=2, mesh=mesh)
    return gradients(global_k.exp().sum(), k)


def compute_in_between(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Two layers; the input is read in flight, and three messages cross."""
    x = normal(3, 4)
    first = launch_all_gather(x, dim=0, mesh=mesh, layer="layers.0")
    query = x.exp()
    second = launch_all_gather(query, x * 2, dim=0, mesh=mesh, layer="layers.1")
    query = query.tanh() + x
    (k,) = first.wait()
    third = launch_all_gather(k[:3] * query, dim=0, mesh=mesh, layer="layers.2")
    query = query @ k.t()
    last, (a, b) = third.wait()[0], second.wait()
    return gradients((query @ (a + b + last)).square().sum(), x)


def attention_like(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    handle = launch_all_gather(x.cos(), dim=0, mesh=mesh, layer="layers.0")
    query = x.sin()
    (k,) = handle.wait()
    return query.exp() * (k * k).sum()


def checkpoint_reentrant(mesh: DeviceMesh) -> list[torch.Tensor]:
    x = normal(3)
    checkpoint(attention_like, x, mesh, use_reentrant=True).sum().backward()
    return [x.grad]


def checkpoint_with_an_early_stop(mesh: DeviceMesh) -> list[torch.Tensor]:
    def layer(x: torch.Tensor) -> torch.Tensor:
        handle = launch_all_gather(x.cos(), dim=0, mesh=mesh, layer="layers.0")
        query = x.sin()  # the last tensor that is saved: a recomputation stops here and leaves the message
        (k,) = handle.wait()
        return query + k.sum()

    x = normal(3)
    return gradients(checkpoint(layer, x, use_reentrant=False).sum(), x)


def sum_gradients(mesh: DeviceMesh) -> list[torch.Tensor]:
    weight = normal(4, 4)
    (weight @ weight.t()).sum().backward()
    counts = torch.arange(3)
    all_reduce_sum([weight.grad], mesh=mesh)
    all_reduce_sum([counts], mesh=mesh)
    return [weight.grad, counts]


def launch_for_inference(mesh: DeviceMesh) -> list[torch.Tensor]:
    with torch.inference_mode():
        handle = launch_all_gather(normal(3, 4), dim=0, mesh=mesh)
    return [handle.wait()[0].clone()]


PROGRAMS: dict[str, Callable[[DeviceMesh], list[torch.Tensor]]] = {
    "gather": gather_at_once,
    "native reduce-scatter": reduce_natively,
    "16 bit": gather_in_16_bit,
    "compute in between": compute_in_between,
    "reentrant checkpoint": checkpoint_reentrant,
    "checkpoint that stops early": checkpoint_with_an_early_stop,
    "sums": sum_gradients,
    "inference": launch_for_inference,
}


def run_program(name: str) -> tuple[list[torch.Tensor], list[tuple[Any, ...]], bool]:
    with CollectiveTrace() as trace:
        found = PROGRAMS[name](cp_mesh())
    check_no_pending(where="the step")
    records = [(r.op, r.group, r.dtype, r.bytes_received, r.layer, r.phase) for r in trace.records]
    return found, records, bool(watchers._watchers)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_legal_program_gives_the_same_bits_and_records_with_and_without(worlds: Any, name: str) -> None:
    sanitized, plain = worlds(2).run(run_program, name), worlds(2).run(run_program, name, sanitize=False)
    for (found, records, is_watched), (expected, expected_records, is_watched_without) in zip(
        sanitized, plain, strict=True
    ):
        assert (is_watched, is_watched_without) == (True, False)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert records == expected_records
        assert records


# --- what is free to do with a buffer in flight ---------------------------------------------------------------------


def touch_without_reading() -> list[Any]:
    whole = torch.zeros(3, 4, 2)
    output, input = whole[1], whole[0, :2]
    columns = torch.ones(4, 6)
    messages = [
        Message("all_gather", output, input, mesh=cp_mesh(), layer="layers.0", phase="forward"),
        Message("all_gather", torch.empty(8, 6), columns, mesh=cp_mesh(), layer="layers.1", phase="forward"),
    ]
    views = [output.t(), output.view(8), output[1:, ::2], output.detach(), *output.split(2), output.expand(2, 4, 2)]
    shapes = [torch.empty_like(output), output.new_zeros(2), torch.zeros_like(views[2]), output.new_full((1,), 3)]
    with torch.inference_mode():
        views += [output.reshape(8), output.contiguous(), output.to(output.dtype)]
    output.unsqueeze_(0)
    _ = torch.eye(2).to_sparse().detach() * 2  # has no memory to compare
    _ = input + 1, columns.sum()  # both inputs may be read
    whole[2].fill_(7)  # other parts of the same memory may be written
    whole[0, 2:].fill_(7)
    for message in messages:
        message.wait()
    return [len(views), len(shapes), output.tolist(), whole[2].unique().tolist()]


def test_shapes_views_and_the_memory_around_are_free(worlds: Any) -> None:
    assert worlds(2).run(touch_without_reading) == [[10, 4, [[[0.0] * 2] * 4], [7.0]]] * 2


def write_between_the_columns_that_travel() -> bool:
    """The output `[4, 1]` is every other element of its memory; what lies between belongs to the program."""
    memory = torch.zeros(4, 2)
    sanitizer = PendingBufferSanitizer()
    with sanitizer:
        lent = sanitizer.lend("all_gather", memory[:, :1], torch.ones(2))
        lent.launched()
        memory[:, 1].fill_(7)
        lent.waited()
    return memory.tolist() == [[0.0, 7.0]] * 4


def test_elements_between_those_of_a_buffer_are_free(worlds: Any) -> None:
    assert worlds(1).run(write_between_the_columns_that_travel) == [True]


def strides_that_travel() -> list[tuple[int, ...]]:
    sanitizer = PendingBufferSanitizer()
    lent = sanitizer.lend("all_gather", torch.zeros(4, 4)[:, ::2], torch.zeros(2, 2).t())
    return [tensor.stride() for tensor in lent.travelling]


def test_a_backend_gets_the_programs_strides_which_it_may_refuse(worlds: Any) -> None:
    assert worlds(1).run(strides_that_travel) == [[(4, 2), (1, 2)]]


def gather_between_strided_buffers() -> list[list[float]]:
    memory, input = torch.zeros(4, 4), torch.arange(4.0).view(2, 2).t()
    Message("all_gather", memory[:, ::2], input, mesh=cp_mesh(), layer=None, phase="forward").wait()
    return memory.tolist()


@pytest.mark.parametrize("sanitize", [True, False], ids=["with", "without"])
def test_strided_buffers_get_what_they_get_without(worlds: Any, sanitize: bool) -> None:
    expected = [[0.0, 0.0, 2.0, 0.0], [1.0, 0.0, 3.0, 0.0]] * 2
    assert worlds(2).run(gather_between_strided_buffers, sanitize=sanitize) == [expected] * 2


def write_after_a_recomputation_stopped_early() -> str:
    input = torch.ones(2)
    message = Message("all_gather", torch.empty(4), input, mesh=cp_mesh(), layer=None, phase="recompute")
    del message  # waited for silently
    input.zero_()
    return "no error"


def test_what_a_recomputation_leaves_behind_guards_nothing(worlds: Any) -> None:
    assert worlds(2).run(write_after_a_recomputation_stopped_early) == ["no error"] * 2


def compile_around_a_gather() -> tuple[int, bool]:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def layer(x: torch.Tensor) -> torch.Tensor:
        query = x.sin().cos()
        handle = launch_all_gather(x, dim=0, mesh=mesh)
        query = query.exp().tanh()
        return query @ handle.wait()[0].t()

    mesh, x = cp_mesh(), normal(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile says where its graph breaks
        compiled = torch.compile(layer, backend=count)(x)
    return len(graphs), torch.equal(compiled, layer(x))


def test_what_is_compiled_is_compiled_as_without(worlds: Any) -> None:
    found = worlds(2).run(compile_around_a_gather)
    assert found == worlds(2).run(compile_around_a_gather, sanitize=False)
    assert all(num_graphs > 0 and is_equal for num_graphs, is_equal in found)
