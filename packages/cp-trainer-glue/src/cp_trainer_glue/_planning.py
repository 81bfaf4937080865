"""`cp-train plan`: a run explained, on one machine and without ranks."""

import sys
from collections.abc import Sequence

from cp_core import ContextParallelError

from ._inspection import Setting, inspect_config, planning_device
from ._output import STANDARD_OUTPUT, console, write_json
from ._plan_report import PlanReport, plan_report
from ._plan_view import show_plan

WRONG_CONFIG = 2


def plan(
    path: str, overrides: Sequence[str], *, num_ranks: int | None, device_type: str | None, json_path: str | None
) -> int:
    """Print what a config would run and what is wrong with it; return the exit status.

    Args:
        path: The config file.
        overrides: `--set` options.
        num_ranks: Ranks that there will be; None takes what the config needs.
        device_type: Where the attentions would run; None is what this machine has.
        json_path: Where to write the plan as JSON, "-" for standard output instead of the text.
    """
    device = planning_device(device_type)
    inspection = inspect_config(path, overrides, setting=Setting(world_size=num_ranks, device=device))
    report = plan_report(inspection, device)
    if json_path != STANDARD_OUTPUT:
        show_plan(report, console())
        sys.stdout.flush()
    status = 0
    for action in (lambda: _write_json(report, json_path), inspection.raise_faults):
        try:
            action()
        except ContextParallelError as error:
            print(f"error: {error}", file=sys.stderr)
            status = WRONG_CONFIG
    return status


def _write_json(report: PlanReport, path: str | None) -> None:
    if path is not None:
        write_json(report.as_json(), path)
