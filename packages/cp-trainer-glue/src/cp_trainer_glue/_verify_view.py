"""A proof as a person reads it in a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from ._verify import Check, VerifyReport, largest_error

_FAILURES_SHOWN = 8
# What the kinds of checks are called, in the order in which a step computes.
_KINDS = {
    "inputs": "tokens of each rank",
    "positions": "positions",
    "labels": "shifted labels",
    "layer": "outputs of layers",
    "logits": "logits",
    "valid_tokens": "tokens with a label",
    "loss": "loss",
    "gradient": "gradients",
    "grad_norm": "gradient norm",
    "clipped_gradient": "clipped gradients",
    "parameter": "parameters after a step",
    "replicas": "equal on all ranks",
    "optimizer": "optimizer's parameters",
    "pending": "collectives finished",
}


def show_verification(report: VerifyReport, console: Console) -> None:
    """Print what was compared, what differs, and why."""
    console.print(
        f"[bold]{escape(report.model)} on {report.ranks}, beside one device\n[/]"
        f"{_count(report.num_steps, 'step')}, {report.num_tokens:,} tokens a step of which {report.num_labels:,} have "
        f"a label, {_count(report.num_parameters, 'parameter')} of {report.num_entries:,} entries",
        soft_wrap=True,
    )
    if report.changes:
        console.print("[bold]changed so that it can be compared")
        for line in report.changes:
            console.print(f"  {escape(line)}", soft_wrap=True)
    console.print("[bold]compared")
    console.print(Padding(_comparisons(report), (0, 0, 1, 2), expand=False))
    for line in _verdict(report):
        console.print(line, soft_wrap=True)


def _comparisons(report: VerifyReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "numbers", "wrong", "largest error", "allowed"):
        table.add_column(column, justify="left" if column == "" else "right")
    for kind, words in _KINDS.items():
        checks = report.of_kind(kind)
        if checks:
            table.add_row(words, *_cells(checks), style=None if all(c.passed for c in checks) else "red")
    return table


def _cells(checks: Sequence[Check]) -> Iterator[str]:
    wrong, limit = sum(not check.passed for check in checks), max(check.limit for check in checks)
    yield f"{len(checks):,}"
    yield str(wrong or "-")
    error = largest_error(checks)
    yield f"{error:.1e}" if error and limit else f"{error:g}"
    yield f"{limit:.0e}" if limit else "0"


def _verdict(report: VerifyReport) -> Iterator[str]:
    if report.passed:
        yield f"[bold green]verified:[/] all {len(report.checks):,} comparisons agree with one device."
        return
    failed = report.failed
    yield (
        f"[bold red]not verified:[/] {len(failed):,} of {len(report.checks):,} comparisons differ from one device, in "
        f"step {failed[0].step}."
    )
    yield from _firsts(report)
    for cause in report.causes:
        yield f"[bold]likely cause[/] ({cause.kind}): {escape(cause.sentence)}"
        yield f"  because {escape(cause.evidence)}"
    if not report.causes:
        yield "[bold]likely cause[/]: none of the known ones; what differs first is where to look."
    for check in failed[:_FAILURES_SHOWN]:
        detail = f"  {escape(check.detail)}" if check.detail else ""
        yield f"  {check.kind} {escape(check.name)}: {check.error:.1e}, allowed {check.limit:.0e}{detail}"
    if len(failed) > _FAILURES_SHOWN:
        yield f"  and {len(failed) - _FAILURES_SHOWN:,} more; --json FILE has them all."


def _firsts(report: VerifyReport) -> Iterator[str]:
    found = report.firsts
    for words, name in (("layer", found.layer), ("token", found.token), ("parameter", found.parameter)):
        if name:
            yield f"first {words} that differs: [bold]{escape(name)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
