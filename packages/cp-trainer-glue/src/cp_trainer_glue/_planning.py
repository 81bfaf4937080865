"""`cp-train plan`: a run explained, on one machine and without ranks."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cp_core import ContextParallelError, InvalidInputError

from ._inspection import Setting, inspect_config, planning_device
from ._plan_report import PlanReport, plan_report
from ._plan_view import show_plan

WRONG_CONFIG = 2
_WIDTH_WITHOUT_TERMINAL = 160
_STANDARD_OUTPUT = "-"


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
    if json_path == _STANDARD_OUTPUT:
        print(json.dumps(report.as_json()))
    else:
        show_plan(report, _console())
    sys.stdout.flush()
    status = 0
    for action in (inspection.raise_faults, lambda: _write_json(report, json_path)):
        try:
            action()
        except ContextParallelError as error:
            print(f"error: {error}", file=sys.stderr)
            status = WRONG_CONFIG
    return status


def _write_json(report: PlanReport, path: str | None) -> None:
    if path is None or path == _STANDARD_OUTPUT:
        return
    try:
        Path(path).write_text(json.dumps(report.as_json()) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--json: cannot write {path!r}: {error}.") from error


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
