"""The command `cp-train`."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import get_args, get_type_hints

from cp_core import ContextParallelError

from ._inspection import Inspection, Setting, inspect_config, planning_device
from ._launcher import launch
from ._planning import WRONG_CONFIG, plan
from ._verify import VerifyOptions
from ._verifying import verify_rank
from ._worker import RankWork, run_rank, train_rank

_DEVICES = ("cpu", "cuda", "npu")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `cp-train` and exit with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if os.getcwd() not in sys.path:  # wrappers of the user's own are found beside the config, as under `python -m`
        sys.path.insert(0, os.getcwd())
    sys.exit(_main(_parser().parse_args(given), given))


def _main(options: argparse.Namespace, given: Sequence[str]) -> int:
    try:
        return _plan(options) if options.command == "plan" else _on_ranks(options, given, _work_of(options))
    except ContextParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_CONFIG


def _plan(options: argparse.Namespace) -> int:
    if os.environ.get("RANK", "0") != "0":  # one rank of torchrun is enough to say it
        return 0
    return plan(
        options.config,
        options.set,
        num_ranks=options.nproc,
        device_type=options.device,
        json_path=options.json,
    )


def _work_of(options: argparse.Namespace) -> RankWork:
    if options.command == "run":
        return train_rank
    asked = VerifyOptions(
        steps=options.steps, dtype=options.dtype, seq_length=options.seq_length, layers=options.layers
    )
    return partial(verify_rank, options=asked, json_path=options.json)


def _on_ranks(options: argparse.Namespace, given: Sequence[str], work: RankWork) -> int:
    if "RANK" in os.environ:  # started by torchrun, or by this command itself
        return run_rank(options.config, options.set, options.device, work)
    setting = Setting(world_size=options.nproc)
    # The model costs a look only where something is wrong already: the ranks look at it anyway.
    inspection = inspect_config(options.config, options.set, setting=setting, with_model=False)
    if inspection.faults:
        setting = Setting(world_size=options.nproc, device=planning_device(options.device))
        inspection = inspect_config(options.config, options.set, setting=setting)
    inspection.raise_faults()
    return launch(given, _num_ranks(inspection))


def _num_ranks(inspection: Inspection) -> int:
    if inspection.config is None:
        raise AssertionError(f"{inspection.name} has neither a config nor a fault.")
    return inspection.config.accelerator.world_size


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, but is {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cp-train", description="Train on sequences too long for one device.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train from a config, or go on where it stopped")
    _add_common_options(run, ranks="ranks to start here")
    plan_ = commands.add_parser(
        "plan", help="explain what a config would run and what is wrong with it; starts nothing"
    )
    _add_common_options(plan_, ranks="ranks there will be")
    _add_json_option(plan_, "plan")
    _add_verify_options(
        commands.add_parser("verify", help="train a few steps as declared and on one device, and compare every number")
    )
    return parser


def _add_verify_options(verify: argparse.ArgumentParser) -> None:
    default = VerifyOptions()
    _add_common_options(verify, ranks="ranks to start here")
    _add_json_option(verify, "report")
    verify.add_argument(
        "--steps", type=_positive, default=default.steps, metavar="N", help="optimizer steps (%(default)s)"
    )
    verify.add_argument("--seq-length", type=_positive, metavar="S", help="tokens of a sample (default: the config's)")
    verify.add_argument("--layers", type=_positive, metavar="N", help="keep the first N layers (default: all)")
    verify.add_argument(
        "--dtype",
        choices=get_args(get_type_hints(VerifyOptions)["dtype"]),
        default=default.dtype,
        help="float64 leaves nothing but rounding of 1e-16 to differ; config keeps the config's dtypes (%(default)s)",
    )


def _add_json_option(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help=f"write the {what} as JSON; without FILE, print it instead"
    )


def _add_common_options(command: argparse.ArgumentParser, *, ranks: str) -> None:
    command.add_argument("config", metavar="CONFIG.yaml")
    command.add_argument("--nproc", type=_positive, metavar="N", help=f"{ranks} (default: what the config needs)")
    command.add_argument("--device", choices=_DEVICES, help="device type (default: what this machine has)")
    command.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="replace a setting of the config; repeatable"
    )
