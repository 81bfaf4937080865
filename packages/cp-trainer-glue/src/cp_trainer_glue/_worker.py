"""One rank of `cp-train run`."""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from cp_collectives import FailureReport, current_platform
from cp_core import ContextParallelError, PeerError

from ._config_file import load_config
from ._trainer import TextTrainer

FAILED, INTERRUPTED = 1, 130


def run_rank(path: str, overrides: Sequence[str], device_type: str | None) -> int:
    """Train as one of the ranks that torchrun or `cp-train` started; return the process's exit status.

    Args:
        path: The config file.
        overrides: `--set` options.
        device_type: `"cpu"`, `"cuda"`, `"npu"`, or None for what this machine has.
    """
    config = load_config(path, overrides)
    platform = current_platform(device_type)
    platform.load()
    device = platform.device(int(os.environ["LOCAL_RANK"]))
    platform.set_device(device)
    _set_up_logging(int(os.environ["RANK"]))
    dist.init_process_group(platform.process_group_backend)
    report = FailureReport()
    try:
        with report:
            finished = TextTrainer(config, platform, device).train()
    except PeerError:
        return FAILED  # the rank that failed first says why
    except (ContextParallelError, OSError) as error:
        if report.is_first:
            print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED  # before the first step: there is nothing to save
    except Exception:
        if report.is_first:
            print(f"error on rank {dist.get_rank()}:\n{traceback.format_exc()}", file=sys.stderr)
        return FAILED
    dist.destroy_process_group()
    return 0 if finished else INTERRUPTED


def _set_up_logging(rank: int) -> None:
    # torchdata 0.11 calls it under torch 2.13; nothing that a user could change.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    level = logging.INFO if rank == 0 else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("cp_trainer_glue", "cp_wrappers"):
        logging.getLogger(name).setLevel(level)
