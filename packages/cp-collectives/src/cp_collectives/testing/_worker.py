"""The process of one rank: it answers messages until its world is closed or its parent dies."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from cp_collectives.testing._failures import RankFailure
from cp_collectives.testing._functions import FunctionLoader
from cp_collectives.testing._messages import Call, RankSpec, Reply, Reset, receive, send, unpickle
from cp_collectives.testing._sanitizer import PendingBufferSanitizer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_STORE_TIMEOUT = timedelta(minutes=10)


def serve(connection: Connection, spec: RankSpec) -> None:
    """Run rank `spec.rank`: answer each message on `connection` with one `Reply`, until it is closed."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _redirect_output(spec)
    worker = _Worker(spec)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            send(connection, worker.answer(receive(connection)))
    # Without the destructors: a process group with an unfinished collective would wait for its peers.
    os._exit(0)


class _Worker:
    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._loader = FunctionLoader()
        self._store: dist.TCPStore | None = None

    def answer(self, message: Reset | Call) -> Reply:
        try:
            value = self._reset(message) if isinstance(message, Reset) else self._call(message)
        except BaseException as error:  # also SystemExit: a test that exits has failed, the world lives on
            return Reply(failure=_describe(self._spec.rank, error))
        return Reply(value=value)

    def _call(self, call: Call) -> bytes:
        function = self._loader.load(call.function)
        args, kwargs = unpickle(call.arguments)
        where = f"{call.function.qualified_name}()"
        with PendingBufferSanitizer(where=where) if call.sanitize else contextlib.nullcontext():
            result = function(*args, **kwargs)
        return pickle.dumps(result)

    def _reset(self, reset: Reset) -> bytes:
        if self._store is None:
            self._store = self._start()
        if dist.is_initialized():
            dist.destroy_process_group()
            _forget_meshes()
            gc.collect()  # a model in a cycle would keep its groups, whose threads take time from the tests that follow
        dist.init_process_group(
            self._spec.backend,
            store=dist.PrefixStore(reset.prefix, self._store),
            rank=self._spec.rank,
            world_size=self._spec.size,
        )
        _reset_globals(self._spec.threads)
        return b""

    def _start(self) -> dist.TCPStore:
        if self._spec.setup is not None:
            self._loader.load(self._spec.setup)()
        return dist.TCPStore("127.0.0.1", self._spec.store_port, is_master=False, timeout=_STORE_TIMEOUT)


def _forget_meshes() -> None:
    """Drop what DTensor remembers of meshes: it would meet a new mesh of the same shape with groups that are gone."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()


def _reset_globals(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)


def _describe(rank: int, error: BaseException) -> RankFailure:
    return RankFailure(
        rank=rank,
        failed_at=time.monotonic(),
        error_type=type(error).__name__,
        error_message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _redirect_output(spec: RankSpec) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with Path(spec.output_file).open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=os.open(spec.stack_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    # Ctrl-C reaches the whole process group; the parent decides what becomes of its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
