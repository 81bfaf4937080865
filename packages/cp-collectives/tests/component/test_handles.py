"""The life of a handle: waited for exactly once, and all else is an error that names layer and invocation."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_collectives import CollectiveTrace, LifecycleError, PendingCollective, check_no_pending, launch_all_gather


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def launch(mesh: DeviceMesh, layer: str | None) -> PendingCollective:
    return launch_all_gather(torch.ones(2, requires_grad=True), dim=0, mesh=mesh, layer=layer)


def message_of(action: Callable[[], object]) -> str:
    """Return what `action` complains about, or that it does not."""
    try:
        action()
    except LifecycleError as error:
        return str(error)
    return "no error"


def forget_dropped() -> None:
    """Leave nothing for the next test; torch's engine lets go of a broken backward only in the next one."""
    (torch.ones(1, requires_grad=True) * 2).sum().backward()
    gc.collect()
    message_of(lambda: check_no_pending(where="the test"))


def drop_then_launch() -> list[str]:
    mesh = cp_mesh()
    launch(mesh, "layers.3.self_attn")
    found = [message_of(lambda: launch(mesh, "layers.4.self_attn"))]
    return [*found, message_of(lambda: launch(mesh, "layers.4.self_attn").wait())]


def test_a_dropped_handle_is_an_error_at_the_next_launch_and_only_there(worlds: Any) -> None:
    for first, second in worlds(2).run(drop_then_launch):
        assert first == (
            "all_gather of layer 'layers.3.self_attn' (invocation 1): launched and dropped without wait(). Ranks are "
            "out of step from here on; wait for each PendingCollective exactly once, also where an exception leaves "
            "the forward."
        )
        assert second == "no error"


def drop_then_end_step() -> list[str]:
    mesh = cp_mesh()
    launch(mesh, "dropped")
    launch_again = [message_of(lambda: check_no_pending(where="step 7"))]
    return [*launch_again, message_of(lambda: check_no_pending(where="step 8"))]


def test_a_dropped_handle_is_an_error_at_the_end_of_the_step(worlds: Any) -> None:
    for first, second in worlds(2).run(drop_then_end_step):
        assert first.startswith("all_gather of layer 'dropped' (invocation 1): launched and dropped without wait().")
        assert second == "no error"


def keep_until_end_of_step() -> list[str]:
    mesh = cp_mesh()
    kept = [launch(mesh, "kept.0"), launch(mesh, "kept.1"), launch(mesh, None)]
    found = message_of(lambda: check_no_pending(where="step 3"))
    for handle in kept:
        handle.wait()
    return [found, message_of(lambda: check_no_pending(where="step 4"))]


def test_handles_still_held_at_the_end_of_a_step_are_an_error_that_names_each(worlds: Any) -> None:
    for first, second in worlds(2).run(keep_until_end_of_step):
        assert first.startswith(
            "3 collective(s) still pending at the end of step 3: all_gather outside any layer (invo"
        )
        assert "all_gather of layer 'kept.0' (invocation 1); all_gather of layer 'kept.1' (invocation 1)" in first
        assert second == "no error"


def count_invocations() -> str:
    mesh = cp_mesh()
    for _ in range(3):
        launch(mesh, "counted").wait()
    handle = launch(mesh, "counted")
    found = message_of(lambda: check_no_pending(where="a step"))
    handle.wait()
    return found


def test_the_invocation_counts_the_messages_of_a_layer(worlds: Any) -> None:
    assert all("of layer 'counted' (invocation 4)" in found for found in worlds(2).run(count_invocations))


def wait_twice() -> str:
    handle = launch(cp_mesh(), "twice")
    handle.wait()
    return message_of(handle.wait)


def test_waiting_twice_is_an_error(worlds: Any) -> None:
    expected = "all_gather of layer 'twice' (invocation 1) was waited for twice; keep the result of the first wait()."
    assert worlds(2).run(wait_twice) == [expected] * 2


def fail_between_launch_and_wait() -> list[str]:
    mesh = cp_mesh()

    def forward() -> None:
        handle = launch(mesh, "broken")
        raise KeyError("bad expert")
        handle.wait()

    with contextlib.suppress(KeyError):
        forward()
    gc.collect()
    return [message_of(lambda: check_no_pending(where="the step")), message_of(lambda: launch(mesh, "next").wait())]


def test_an_exception_between_launch_and_wait_is_noticed(worlds: Any) -> None:
    for first, second in worlds(2).run(fail_between_launch_and_wait):
        assert first.startswith("all_gather of layer 'broken' (invocation 1): launched and dropped")
        assert second == "no error"


def fail_in_backward() -> list[str]:
    """An exception in backward, after the exchange was launched and before it was waited for."""
    mesh = cp_mesh()

    def refuse(grad: torch.Tensor) -> None:
        raise KeyError("bad hook")

    def step() -> None:
        x = torch.ones(2, requires_grad=True)
        handle = launch_all_gather(x, dim=0, mesh=mesh, layer="backward")
        query = x * 2
        query.register_hook(refuse)
        (k,) = handle.wait()
        (query.sum() * k).sum().backward()

    raised = "nothing"
    try:
        step()
    except KeyError as error:
        raised = str(error)
    found = message_of(lambda: check_no_pending(where="the step"))
    forget_dropped()
    return [raised, found]


def test_an_exception_in_backward_names_the_exchange_it_left(worlds: Any) -> None:
    for raised, found in worlds(2).run(fail_in_backward):
        assert raised == "'bad hook'"
        assert "all_to_all of layer 'backward' (invocation 2)" in found


def without_gradients() -> list[Any]:
    mesh, found = cp_mesh(), []
    for guard in (torch.no_grad, torch.inference_mode):
        with guard(), CollectiveTrace() as trace:
            (gathered,) = launch(mesh, "frozen").wait()
        found.append((gathered.tolist(), gathered.requires_grad, [record.phase for record in trace.records]))
    check_no_pending(where="the test")
    return found


def test_without_gradients_the_result_is_the_same_and_nothing_goes_back(worlds: Any) -> None:
    expected = ([1.0] * 4, False, ["forward"])
    assert worlds(2).run(without_gradients) == [[expected, expected]] * 2


def reported_once() -> list[str]:
    mesh = cp_mesh()
    kept = [launch(mesh, "reported")]
    found = [message_of(lambda: check_no_pending(where="step 1"))]
    kept.clear()
    gc.collect()
    return [*found, message_of(lambda: check_no_pending(where="step 2"))]


def test_a_handle_that_was_reported_is_not_reported_again_when_it_goes(worlds: Any) -> None:
    for first, second in worlds(2).run(reported_once):
        assert first.startswith("1 collective(s) still pending at the end of step 1")
        assert second == "no error"
