"""The messages between a world and its ranks; they travel as pickled bytes, tensors included."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from cp_collectives.testing._failures import RankFailure
    from cp_collectives.testing._functions import FunctionReference


@dataclass(frozen=True, kw_only=True, slots=True)
class Reset:
    """Replace the rank's process groups by a new default group whose keys in the store have this prefix."""

    prefix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Call a function; its arguments are unpickled once its module is there."""

    function: FunctionReference
    arguments: bytes  # pickled (args, kwargs)
    sanitize: bool  # under a PendingBufferSanitizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A rank's answer to a message."""

    value: bytes = b""  # pickled result
    failure: RankFailure | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """What a rank's process needs to know when it starts."""

    rank: int
    size: int
    backend: str
    threads: int
    store_port: int
    output_file: str  # takes the rank's stdout and stderr
    stack_file: str  # takes the rank's stacks when it is asked for them
    setup: FunctionReference | None


def send(connection: Connection, message: Reset | Call | Reply) -> None:
    """Send one message; plain pickle, because multiprocessing's own would share tensors through file descriptors."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receive one message.

    Raises:
        EOFError: The other side is gone.
    """
    return pickle.loads(connection.recv_bytes())


def unpickle(content: bytes) -> Any:
    """Load a pickled object; classes and functions of test files are found in the modules that are loaded already.

    pickle would import such a module's parent packages first, and for a file that pytest loaded there are none.
    """
    return _LoadedFirst(io.BytesIO(content)).load()


class _LoadedFirst(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in sys.modules:
            return attrgetter(name)(sys.modules[module])
        return super().find_class(module, name)
