"""Each kind of error can also be caught as the built-in exception that fits it."""

import pytest

from cp_collectives import ContextParallelError, InvalidInputError, LifecycleError, PeerError, UnsupportedError


@pytest.mark.parametrize(
    ("kind", "built_in"),
    [
        (InvalidInputError, ValueError),
        (UnsupportedError, NotImplementedError),
        (LifecycleError, RuntimeError),
        (PeerError, RuntimeError),
    ],
    ids=lambda kind: kind.__name__,
)
def test_each_kind_is_a_context_parallel_error_and_a_built_in_one(kind: type[Exception], built_in: type) -> None:
    assert issubclass(kind, ContextParallelError)
    assert issubclass(kind, built_in)


def test_a_wrong_input_is_not_taken_for_a_wrong_order_of_calls() -> None:
    assert not issubclass(InvalidInputError, RuntimeError)
    assert not issubclass(LifecycleError, ValueError)
