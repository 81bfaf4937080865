"""Opening and closing traces; what ranks write into them is tested with ranks."""

import threading

import torch

from cp_collectives import CollectiveRecord, CollectiveTrace
from cp_collectives._trace import forward_phase, record_launch


def record(op: str) -> CollectiveRecord:
    return CollectiveRecord(
        op=op, group="cp", dtype=torch.float32, bytes_received=0, layer=None, phase="forward", launched_at=0.0
    )


def ops(trace: CollectiveTrace) -> list[str]:
    return [entry.op for entry in trace.records]


def test_a_trace_sees_what_happens_while_it_is_open() -> None:
    record_launch(record("before"))
    with CollectiveTrace() as trace:
        record_launch(record("inside"))
    record_launch(record("after"))
    assert ops(trace) == ["inside"]


def test_nested_traces_both_see_the_inner_message() -> None:
    with CollectiveTrace() as outer:
        record_launch(record("first"))
        with CollectiveTrace() as inner:
            record_launch(record("second"))
        record_launch(record("third"))
    assert ops(outer) == ["first", "second", "third"]
    assert ops(inner) == ["second"]


def test_closing_one_of_two_equal_traces_keeps_the_other_open() -> None:
    first, second = CollectiveTrace(), CollectiveTrace()
    assert first == second
    with first:
        with second:
            pass
        record_launch(record("late"))
    assert (ops(first), ops(second)) == (["late"], [])


def test_a_trace_closes_when_its_body_raises() -> None:
    trace = CollectiveTrace()
    try:
        with trace:
            raise KeyError("stop")
    except KeyError:
        pass
    record_launch(record("late"))
    assert trace.records == []


def test_a_trace_sees_messages_of_other_threads() -> None:
    with CollectiveTrace() as trace:
        thread = threading.Thread(target=record_launch, args=(record("engine"),))
        thread.start()
        thread.join()
    assert ops(trace) == ["engine"]


class AskPhase(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, phases: list[str]) -> torch.Tensor:
        phases.append(forward_phase())
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def test_a_forward_inside_a_backward_is_a_recomputation() -> None:
    phases: list[str] = []
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(AskPhase.apply, x, phases, use_reentrant=True).sum().backward()
    assert phases == ["forward", "recompute"]
    assert forward_phase() == "forward"
