"""Letting the threads of a CPU group finish before the interpreter goes.

A gloo thread lets go of the tensors of a collective after it has woken the waiter. Where a program ends right after its
last collective, that falls into the interpreter's finalization, and torch 2.13 aborts the process ("terminate called
without an active exception"): a finished run would end with a failing exit status.
"""

import atexit
import time
from functools import cache

# Long enough for a runnable thread to be scheduled on a busy machine; the threads need microseconds.
_SECONDS = 0.2


@cache
def finish_threads_at_exit() -> None:
    """Give the threads that time when the process ends normally; every call after the first does nothing."""
    atexit.register(time.sleep, _SECONDS)
