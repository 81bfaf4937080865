"""Starting the ranks of a run on this machine, through torch's elastic launcher."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ._worker import FAILED, INTERRUPTED

# Time for the ranks to finish a step and save once they are asked to stop.
_STOP_SECONDS = 600


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `cp-train` with the same arguments on each of `num_ranks` ranks; return the exit status.

    Args:
        arguments: What the command was given.
        num_ranks: Processes to start here.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="cp-train",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=_STOP_SECONDS,
    )
    logging.disable(logging.ERROR)  # the ranks say themselves what failed; the launcher's own lines repeat it
    try:
        elastic_launch(config, sys.executable)("-m", "cp_trainer_glue", *arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        return _status_of(error)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _status_of(error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode == INTERRUPTED:
        return INTERRUPTED
    if failure.exitcode < 0:  # nobody could say anything
        print(f"error: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}.", file=sys.stderr)
    return FAILED
