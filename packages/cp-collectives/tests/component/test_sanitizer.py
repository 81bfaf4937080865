"""Each misuse of a buffer in flight, planted: World.run refuses it and names operator and collective."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import flex_attention

from cp_collectives import LifecycleError, check_no_pending, launch_all_gather
from cp_collectives._message import Message, Operation
from cp_collectives.testing import RankFailed, World, install_npu_stand_in, to_npu


def reads(layer: str, op: str = "all_gather") -> str:
    name = f"{op} of layer {layer!r} (invocation 1)"
    return f"reads the output of {name} before it was waited for; call wait() first and read what it returns."


def writes(buffer: str, layer: str, op: str = "all_gather") -> str:
    advice = "call wait() first" if buffer == "output" else "call wait() first, or launch a copy"
    return f"writes to the {buffer} of {op} of layer {layer!r} (invocation 1) while it is in flight; {advice}."


def cp_mesh(device_type: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("cp",))


def send(output: torch.Tensor, input: torch.Tensor, layer: str, op: Operation = "all_gather") -> Message:
    return Message(op, output, input, mesh=cp_mesh(output.device.type), layer=layer, phase="forward")


def sentence_of(action: Callable[[], object]) -> str:
    try:
        action()
    except LifecycleError as error:
        return str(error)
    return "no error"


def wait_quietly(message: Message) -> None:
    sentence_of(message.wait)


# --- forward ------------------------------------------------------------------------------------------------------


def in_inference_mode(action: Callable[[], object]) -> None:
    with torch.inference_mode():
        action()


def in_a_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def through_a_dtensor(output: torch.Tensor) -> DTensor:
    return DTensor.from_local(output, cp_mesh(), run_check=False) + 1


# What the user does to the output `[4, 3]` and the input `[2, 3]` of a gather in flight, and the operator that says so.
READ: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "reduced": (lambda output: output.sum(), "aten.sum.default"),
    "through a view": (lambda output: output.t()[1:].detach().mul(2), "aten.mul.Tensor"),
    "as the operand of an in-place operator": (lambda output: torch.ones(4, 3).add_(output), "aten.add_.Tensor"),
    "as the source of a copy": (lambda output: torch.empty(4, 3).copy_(output), "aten.copy_.default"),
    "in a list": (lambda output: torch.cat([torch.ones(1, 3), output[1:]]), "aten.cat.default"),
    "as a number": (lambda output: output[0, 0].item(), "aten._local_scalar_dense.default"),
    "by a keyword": (lambda output: torch.div(torch.ones(4, 3), other=output), "aten.div.Tensor"),
    "by a reshape that copies": (lambda output: output.t().reshape(12), "aten.clone.default"),
    "by a view's operator that copies": (
        lambda output: in_inference_mode(output.t().contiguous),
        "aten.contiguous.default",
    ),
    "by another dtype's view": (lambda output: output.view(torch.int32).add(1), "aten.add.Tensor"),
    "through a DTensor": (through_a_dtensor, "aten.add.Tensor"),
    "by a higher-order operator": (
        lambda output: flex_attention(*[output.view(1, 1, 4, 3)] * 3),
        "flex_attention",
    ),
    "by another launch": (
        lambda output: send(torch.empty(8, 3), output, "reads"),
        "the launch of all_gather of layer 'reads' (invocation 1)",
    ),
}

WRITE_OUTPUT: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "filled": (lambda output: output.zero_(), "aten.zero_.default"),
    "in part": (lambda output: output[3].fill_(1), "aten.fill_.Scalar"),
    "by a sum past this package": (lambda output: dist.all_reduce(output), "c10d.allreduce_.default"),
    "by a launch": (
        lambda output: send(output, torch.ones(2, 3), "overwrites"),
        "the launch of all_gather of layer 'overwrites' (invocation 1)",
    ),
}

WRITE_INPUT: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "in place": (lambda input: input.add_(1), "aten.add_.Tensor"),
    "through its transpose": (lambda input: input.t()[2].zero_(), "aten.zero_.default"),
    "as out": (lambda input: torch.mul(torch.ones(2, 3), 2, out=input), "aten.mul.out"),
    "among others": (lambda input: torch._foreach_add_([torch.ones(1), input], 1), "aten._foreach_add_.Scalar"),
    "by an index": (lambda input: input.__setitem__(torch.tensor([1]), 0), "aten.index_put_.default"),
    "resized": (lambda input: input.resize_(100), "aten.resize_.default"),
    "by a collective past this package": (
        lambda input: dist.all_gather_single(input, torch.ones(1, 3)),
        "c10d._allgather_base_.default",
    ),
    "as the output of another launch": (
        lambda input: send(input, torch.ones(1, 3), "receives"),
        "the launch of all_gather of layer 'receives' (invocation 1)",
    ),
}

MISUSES = {"output read": READ, "output written": WRITE_OUTPUT, "input written": WRITE_INPUT}


def misuse(kind: str, how: str) -> str:
    output, input = torch.empty(4, 3), torch.ones(2, 3)
    message = send(output, input, how)
    buffer = input if kind == "input written" else output
    said = sentence_of(lambda: MISUSES[kind][how][0](buffer))
    wait_quietly(message)
    return said


@pytest.mark.parametrize("how", READ)
def test_an_output_read_before_its_wait_is_an_error(worlds: Any, how: str) -> None:
    assert worlds(2).run(misuse, "output read", how) == [f"{READ[how][1]} {reads(how)}"] * 2


@pytest.mark.parametrize("how", WRITE_OUTPUT)
def test_an_output_written_in_flight_is_an_error(worlds: Any, how: str) -> None:
    assert worlds(2).run(misuse, "output written", how) == [f"{WRITE_OUTPUT[how][1]} {writes('output', how)}"] * 2


@pytest.mark.parametrize("how", WRITE_INPUT)
def test_an_input_written_in_flight_is_an_error(worlds: Any, how: str) -> None:
    assert worlds(2).run(misuse, "input written", how) == [f"{WRITE_INPUT[how][1]} {writes('input', how)}"] * 2


def refused_write() -> list[list[float]]:
    output, input = torch.empty(4), torch.ones(2)
    message = send(output, input, "refused")
    sentence_of(lambda: input.zero_())
    return [input.tolist(), message.wait().tolist()]


def test_a_refused_write_does_not_happen(worlds: Any) -> None:
    assert worlds(2).run(refused_write) == [[[1.0] * 2, [1.0] * 4]] * 2


def write_to_a_tensor_that_travels_itself(num_tensors: int) -> str:
    tensors = [torch.ones(2, 3) for _ in range(num_tensors)]
    handle = launch_all_gather(*tensors, dim=0, mesh=cp_mesh(), layer="single")
    said = sentence_of(lambda: tensors[0].mul_(2))
    handle.wait()
    return said


def test_a_single_tensor_with_the_sequence_first_is_itself_the_input(worlds: Any) -> None:
    assert (
        worlds(2).run(write_to_a_tensor_that_travels_itself, 1) == [f"aten.mul_.Tensor {writes('input', 'single')}"] * 2
    )
    assert worlds(2).run(write_to_a_tensor_that_travels_itself, 2) == ["no error"] * 2


def write_past_operators(buffer: str, how: str) -> str:
    output, input = torch.empty(4, 3), torch.ones(2, 3)
    message = send(output, input, f"{buffer} by {how}")
    written = output if buffer == "output" else input
    if how == "pointer":
        ctypes.memset(written.data_ptr(), 0, 4)
    else:
        in_a_thread(lambda: written[1].zero_())
    return sentence_of(message.wait)


@pytest.mark.parametrize("how", ["pointer", "thread"])
@pytest.mark.parametrize("buffer", ["output", "input"])
def test_a_write_that_no_operator_shows_is_found_at_the_wait(worlds: Any, buffer: str, how: str) -> None:
    expected = (
        f"the {buffer} of all_gather of layer '{buffer} by {how}' (invocation 1) changed between launch and wait, past "
        "torch's operators or in another thread; write to it after wait()."
    )
    assert worlds(2).run(write_past_operators, buffer, how) == [expected] * 2


DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8)
SIZES: dict[Operation, tuple[int, int]] = {"all_gather": (8, 4), "all_to_all": (4, 4), "reduce_scatter": (2, 4)}


def buffers_of(op: Operation, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if op == "all_reduce":
        buffer = torch.arange(4).to(dtype)
        return buffer, buffer
    return torch.zeros(SIZES[op][0], dtype=dtype), torch.arange(SIZES[op][1]).to(dtype)


def peek(op: Operation, dtype: torch.dtype) -> dict[str, Any]:
    """Look at an output in a way that no operator shows, then in one that does, then write where it is forbidden."""
    output, input = buffers_of(op, dtype)
    message = send(output, input, str(dtype), op)
    seen = output.tolist()
    found = {"read": sentence_of(lambda: output + 1), "write": sentence_of(lambda: input.zero_())}
    poison = torch.full_like(output, float("nan") if dtype.is_floating_point or dtype.is_complex else 0)
    if not (dtype.is_floating_point or dtype.is_complex):
        poison.fill_(torch.iinfo(dtype).max)
    return {**found, "poison": repr(seen) == repr(poison.tolist()), "result": message.wait().real.tolist()}


RESULTS = {"all_gather": [0, 1, 2, 3] * 2, "all_reduce": [0, 2, 4, 6]}
RESULTS_OF_RANKS = {"all_to_all": [[0, 1] * 2, [2, 3] * 2], "reduce_scatter": [[0, 2], [4, 6]]}


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_operation_and_dtype_is_guarded_and_then_delivered(worlds: Any, op: str, dtype: torch.dtype) -> None:
    for rank, found in enumerate(worlds(2).run(peek, op, dtype)):
        buffer = "output" if op == "all_reduce" else "input"  # one buffer serves as both
        assert f"reads the output of {op} of layer '{dtype}'" in found["read"]
        assert f"writes to the {buffer} of {op} of layer '{dtype}'" in found["write"]
        assert found["poison"]
        assert found["result"] == (RESULTS[op] if op in RESULTS else RESULTS_OF_RANKS[op][rank])


# --- backward -----------------------------------------------------------------------------------------------------


class Broken(torch.autograd.Function):
    """Launches in backward, and does there what `how` names."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str, kept: list[Any]) -> torch.Tensor:
        ctx.how, ctx.kept = how, kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradient.clone()
        received = torch.empty_like(gradient)
        message = send(received, gradient, f"backward {ctx.how}", "all_to_all")
        ctx.kept += [threading.get_ident(), message]
        if ctx.how == "reads":
            return received * 1, None, None
        if ctx.how == "writes":
            return gradient.mul_(2), None, None
        if ctx.how == "drops":
            ctx.kept.clear()
        return received, None, None


def broken_backward(how: str) -> str:
    kept: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    said = sentence_of(lambda: Broken.apply(x * 3, how, kept).sum().backward())
    wait_quietly(kept[1])
    return said


def test_a_backward_that_reads_before_its_wait_is_an_error(worlds: Any) -> None:
    said = f"aten.mul.Tensor {reads('backward reads', 'all_to_all')}"
    assert worlds(2).run(broken_backward, "reads") == [said] * 2


def test_a_backward_that_writes_to_what_it_sent_is_an_error(worlds: Any) -> None:
    said = f"aten.mul_.Tensor {writes('input', 'backward writes', 'all_to_all')}"
    assert worlds(2).run(broken_backward, "writes") == [said] * 2


def test_a_backward_without_a_wait_is_an_error_in_the_operator_behind_it(worlds: Any) -> None:
    said = f"aten.mul.Tensor {reads('backward forgets the wait', 'all_to_all')}"
    assert worlds(2).run(broken_backward, "forgets the wait") == [said] * 2


def gradient_of_a_leaf(how: str) -> list[str]:
    """End the backward with the buffer in flight, which no operator but the leaf's own accumulation reads."""
    kept: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    said = [sentence_of(lambda: Broken.apply(x, how, kept).sum().backward())]
    return [*said, sentence_of(lambda: check_no_pending(where="the step"))]


def test_a_gradient_still_in_flight_cannot_be_a_leafs(worlds: Any) -> None:
    for said, left in worlds(2).run(gradient_of_a_leaf, "keeps"):
        assert said == f"aten.copy_.default {reads('backward keeps', 'all_to_all')}"
        assert "1 collective(s) still pending at the end of the step: all_to_all of layer 'backward keeps'" in left


def test_a_gradient_whose_handle_was_dropped_cannot_be_a_leafs(worlds: Any) -> None:
    for said, left in worlds(2).run(gradient_of_a_leaf, "drops"):
        assert said == f"aten.copy_.default {reads('backward drops', 'all_to_all')}"
        assert "all_to_all of layer 'backward drops' (invocation 1): launched and dropped without wait()." in left


def broken_backward_on_a_device(how: str) -> tuple[str, bool]:
    kept: list[Any] = []
    x = to_npu(torch.ones(2)).requires_grad_()
    said = sentence_of(lambda: Broken.apply(x, how, kept).sum().backward())
    wait_quietly(kept[1])
    return said, kept[0] == threading.get_ident()


@pytest.mark.parametrize("how", ["reads", "writes"])
def test_a_backward_in_the_engines_own_thread_is_guarded_too(worlds: Any, how: str) -> None:
    said = f"aten.mul.Tensor {reads(f'backward {how}', 'all_to_all')}"
    if how == "writes":
        said = f"aten.mul_.Tensor {writes('input', f'backward {how}', 'all_to_all')}"
    world = worlds(2, setup=install_npu_stand_in, backend="cpu:gloo,npu:gloo")
    assert world.run(broken_backward_on_a_device, how) == [(said, False)] * 2


class Saves(torch.autograd.Function):
    """Keeps a buffer for backward without reading it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(buffer)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def save_an_output(when: str) -> str:
    x, buffer = torch.ones(4, requires_grad=True), torch.zeros(4)
    if when == "before":
        saved = Saves.apply(x, buffer)
    message = send(buffer, torch.ones(2), when)
    if when == "in flight":
        saved = Saves.apply(x, buffer)
    message.wait()
    if when == "after":
        saved = Saves.apply(x, buffer)
    try:
        saved.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_autograd_finds_an_output_that_was_saved_before_its_wait(worlds: Any) -> None:
    # On gloo it finds this or not, as the thread in the background comes sooner or later.
    for when in ("before", "in flight"):
        assert all("modified by an inplace operation" in said for said in worlds(2).run(save_an_output, when))
    assert worlds(2).run(save_an_output, "after") == ["no error"] * 2


# --- the end of a run, and the switch -----------------------------------------------------------------------------

KEPT: list[Any] = []


def leave(how: str) -> None:
    handle = launch_all_gather(torch.ones(2), dim=0, mesh=cp_mesh(), layer="left")
    if how == "kept":
        KEPT.append(handle)
    if how == "raising":
        KEPT.append(handle)
        raise KeyError("bad expert")


def gather_again() -> list[float]:
    KEPT.clear()
    (gathered,) = launch_all_gather(torch.ones(2), dim=0, mesh=cp_mesh()).wait()
    return gathered.tolist()


LEFT = {
    "kept": r"still pending at the end of leave\(\): all_gather of layer 'left'",
    "dropped": r"all_gather of layer 'left' \(invocation 1\): launched and dropped without wait\(\)",
    "raising": "bad expert",
}


@pytest.mark.parametrize("how", LEFT)
def test_a_run_that_leaves_a_collective_fails_and_the_next_run_is_free_of_it(how: str) -> None:
    with World(2) as world:
        with pytest.raises(RankFailed, match=LEFT[how]):
            world.run(leave, how)
        assert world.run(gather_again) == [[1.0] * 4] * 2


def read_early() -> bool:
    output = torch.zeros(4)
    message = send(output, torch.ones(2), "early")
    is_poisoned = bool(output.isnan().any())
    message.wait()
    return is_poisoned


def test_it_is_on_unless_a_run_turns_it_off(worlds: Any) -> None:
    with pytest.raises(RankFailed, match=r"aten.isnan.default reads the output of all_gather of layer 'early'"):
        worlds(2).run(read_early)
    assert worlds(2).run(read_early, sanitize=False) == [False, False]
