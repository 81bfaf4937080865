"""One rank of a command."""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import FailureReport, Platform, agree, current_platform, gather_objects
from cp_core import ContextParallelError, InvalidInputError, PeerError

from ._config import TrainerConfig
from ._inspection import Setting, inspect_config
from ._mesh import world_mesh
from ._text_trainer import TextTrainer

FAILED, INTERRUPTED = 1, 130

# From the config that all ranks agreed on to the exit status.
RankWork = Callable[[TrainerConfig, Platform, torch.device], int]


def train_rank(config: TrainerConfig, platform: Platform, device: torch.device) -> int:
    """Train as one rank; return the exit status."""
    return 0 if TextTrainer(config, platform, device).train() else INTERRUPTED


def run_rank(path: str, overrides: Sequence[str], device_type: str | None, work: RankWork) -> int:
    """Be one of the ranks that torchrun or `cp-train` started; return the process's exit status.

    Args:
        path: The config file.
        overrides: `--set` options.
        device_type: `"cpu"`, `"cuda"`, `"npu"`, or None for what this machine has.
        work: What the ranks do together.
    """
    platform, device = _device_of_rank(device_type)
    _set_up_logging(int(os.environ["RANK"]))
    dist.init_process_group(platform.process_group_backend)
    report = FailureReport()
    try:
        with report:
            config = agreed_config(path, overrides, device)
            status = work(config, platform, device)
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
    return status


def _device_of_rank(device_type: str | None) -> tuple[Platform, torch.device]:
    """Return the platform and device of this rank, with the device ready."""
    numbers = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    if wrong := [f"{name}={value!r}" for name, value in numbers.items() if not value.isdecimal()]:
        raise InvalidInputError(
            f"the environment says that this is a rank of a run, but {', '.join(wrong)} is no number; start ranks with "
            "torchrun, or unset RANK."
        )
    platform = current_platform(device_type)
    try:
        platform.load()
        device = platform.device(int(numbers["LOCAL_RANK"]))
        platform.set_device(device)
    except (ImportError, RuntimeError, AssertionError) as error:  # torch's words for a device that is not there
        raise InvalidInputError(f"--device {platform.device_type} cannot be used here: {error}") from error
    return platform, device


def agreed_config(path: str, overrides: Sequence[str], device: torch.device) -> TrainerConfig:
    """Read this rank's config and stop all ranks if one of them found a fault, or reads something else."""
    mesh = world_mesh(device)
    setting = Setting(world_size=mesh.size(), origin="the launcher started", device=device)
    inspection = inspect_config(path, overrides, setting=setting)
    fault: ContextParallelError | None = None
    try:
        inspection.raise_faults()
    except ContextParallelError as error:
        fault = error
    agree(fault, mesh=mesh)
    if inspection.config is None:
        raise AssertionError(f"{path} has neither a config nor a fault.")
    _require_equal_configs(inspection.config, mesh)
    return inspection.config


def _require_equal_configs(config: TrainerConfig, mesh: DeviceMesh) -> None:
    first, *others = gather_objects(config.model_dump(mode="json"), mesh=mesh)
    for rank, other in enumerate(others, start=1):
        sections = [name for name in first if first[name] != other[name]]
        if sections:
            name = sections[0]
            raise InvalidInputError(
                f"all ranks must read the same config, but rank {rank} differs from rank 0 in {', '.join(sections)}: "
                f"{name} is {first[name]!r} on rank 0 and {other[name]!r} on rank {rank}."
            )


def _set_up_logging(rank: int) -> None:
    # torchdata 0.11 calls it under torch 2.13; nothing that a user could change.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    # A tensor-parallel output layer returns a view of its shard; no loss of TextTrainer writes into the logits.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    level = logging.INFO if rank == 0 else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("cp_trainer_glue", "cp_wrappers"):
        logging.getLogger(name).setLevel(level)
