"""The command `cp-train`."""

import argparse
import os
import sys
from collections.abc import Sequence

from cp_core import ContextParallelError

from ._config_file import load_config
from ._launcher import launch
from ._worker import FAILED, run_rank

_WRONG_CONFIG = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `cp-train` and exit with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_run(_parser().parse_args(given), given))


def _run(options: argparse.Namespace, given: Sequence[str]) -> int:
    if "RANK" in os.environ:  # started by torchrun, or by this command itself
        try:
            return run_rank(options.config, options.set, options.device)
        except ContextParallelError as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
    try:
        num_ranks = load_config(options.config, options.set).accelerator.world_size
    except ContextParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        return _WRONG_CONFIG
    if options.nproc not in (None, num_ranks):
        print(
            f"error: --nproc is {options.nproc}, but the accelerator sizes of {options.config} multiply to {num_ranks} "
            "ranks; leave --nproc out, or change the sizes.",
            file=sys.stderr,
        )
        return _WRONG_CONFIG
    return launch(given, num_ranks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cp-train", description="Train on sequences too long for one device.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train from a config, or go on where it stopped")
    run.add_argument("config", metavar="CONFIG.yaml")
    run.add_argument("--nproc", type=int, metavar="N", help="ranks to start here (default: what the config needs)")
    run.add_argument("--device", choices=("cpu", "cuda", "npu"), help="device type (default: what this machine has)")
    run.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="replace a setting of the config; repeatable"
    )
    return parser
