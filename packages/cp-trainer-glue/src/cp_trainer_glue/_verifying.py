"""`cp-train verify`: the proof on the user's own model, as one rank of it."""

import logging

import torch
import torch.distributed as dist

from cp_collectives import Platform, agree
from cp_core import ContextParallelError

from ._config import TrainerConfig
from ._mesh import world_mesh
from ._output import STANDARD_OUTPUT, console, write_json
from ._text_trainer import TextTrainer
from ._verify import VerifyOptions, VerifyReport, verify_training
from ._verify_view import show_verification

DISAGREED = 1


def verify_rank(
    config: TrainerConfig,
    platform: Platform,
    device: torch.device,
    *,
    options: VerifyOptions,
    json_path: str | None,
) -> int:
    """Verify a run, show the report on the first rank, and return the exit status: 0 only if everything agrees.

    Args:
        config: The run.
        platform, device: Of this rank.
        options: Steps, dtype, and what is shrunk.
        json_path: Where to write the report as JSON, "-" for standard output instead of the text.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of the speed of gathering whole tensors
    report = verify_training(TextTrainer, config, platform, device, options=options)
    # The other ranks wait until all is said: the launcher ends the rest once one rank is gone.
    agree(_shown(report, json_path) if dist.get_rank() == 0 else None, mesh=world_mesh(device))
    return 0 if report.passed else DISAGREED


def _shown(report: VerifyReport, json_path: str | None) -> ContextParallelError | None:
    if json_path != STANDARD_OUTPUT:
        show_verification(report, console())
    try:
        if json_path is not None:
            write_json(report.as_json(), json_path)
    except ContextParallelError as error:
        return error
    return None
