"""A plan as a person reads it in a terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from ._plan_report import AttentionRow, MethodRow, PlanReport, RankCost

_GROUPS_SHOWN = 3
_RANKS_SHOWN = 4
_UNITS = ("", "k", "M", "G", "T", "P")


def show_plan(report: PlanReport, console: Console) -> None:
    """Print a plan; what is wrong with it is said elsewhere."""
    for heading, part in _parts(report):
        console.print(f"[bold]{heading}")
        console.print(Padding(part, (0, 0, 1, 2), expand=False))


def _parts(report: PlanReport) -> Iterator[tuple[str, RenderableType]]:
    if report.axes is not None and report.groups is not None:
        yield f"{report.world_size} ranks on {report.device}", _topology(report.axes, report.groups)
    if report.model is not None:
        yield "model", _model(report)
    if report.sequence is not None:
        yield "sequence", _sequence(report)
    if report.attentions:
        needed = report.axes is None or report.axes["cp"] > 1
        yield (
            "attentions",
            _attentions(report.attentions, without="[red]none" if needed else "none needed at cp_size 1"),
        )
    rows = [row for row in (report.declared, *report.methods) if row is not None]
    if any(row.ranks or row.note for row in rows):
        yield "each rank, all attentions of one micro-batch", _costs(rows)
    refused = [row for row in report.methods if row.refusals]
    if refused:
        yield "methods that cannot serve this model", _refusals(refused)


def _model(report: PlanReport) -> str:
    held = _bytes(report.parameter_bytes or 0)
    return f"{report.model}, {report.num_parameters:,} parameters, {held} on each rank; {report.gradients}"


def _topology(axes: Mapping[str, int], groups: Mapping[str, list[list[int]]]) -> Table:
    table = _table("axis", "size", "groups", "ranks of each group")
    for axis, members in groups.items():
        size = axes.get(axis, len(members[0]))
        if size > 1:
            table.add_row(axis, str(size), str(len(members)), _some(list(map(_ranks, members)), _GROUPS_SHOWN))
    if not table.row_count:
        table.add_row("(one rank)", "1", "1", "0")
    return table


def _ranks(ranks: Sequence[int]) -> str:
    """Write evenly spaced ranks by their ends: 0 8 16 ... 56."""
    if len(ranks) <= 2 * _RANKS_SHOWN:
        return " ".join(map(str, ranks))
    return f"{' '.join(map(str, ranks[:_RANKS_SHOWN]))} ... {ranks[-1]}"


def _some(texts: list[str], shown: int) -> str:
    if len(texts) <= shown + 1:
        return " | ".join(texts)
    return " | ".join([*texts[:shown], "...", texts[-1]])


def _sequence(report: PlanReport) -> str:
    plan = report.sequence
    if plan is None:
        raise AssertionError("a plan without a sequence has none to show.")
    pads = plan.padded_length - plan.global_length
    cut = f"{plan.padded_length:,} (a multiple of {plan.padding_multiple}), {plan.local_length:,} on each rank"
    batches = f"{plan.micro_batches_per_step} x {plan.micro_batch_size} samples per step and data-parallel rank"
    return f"{plan.global_length:,} tokens + {pads} pads = {cut}; {batches}"


def _attentions(rows: Sequence[AttentionRow], *, without: str) -> Table:
    """One line for neighbours that differ in nothing but their names; `without` stands where there is no method."""
    table = _table("attentions", "module", "method", "chosen by")
    runs: list[list[AttentionRow]] = []
    for row in rows:
        if runs and _choice(runs[-1][0]) == _choice(row):
            runs[-1].append(row)
        else:
            runs.append([row])
    for run in runs:
        first, last = run[0], run[-1]
        names = first.fqn if first is last else f"{first.fqn} ... {last.fqn} ({len(run)})"
        chosen = "" if first.entry is None else f"{first.entry} ({first.match})"
        method = without if first.wrapper is None else escape(first.wrapper)
        table.add_row(escape(names or "the model itself"), first.kind, method, escape(chosen))
    return table


def _choice(row: AttentionRow) -> tuple[str | None, ...]:
    return row.kind, row.wrapper, row.channel, row.entry


def _costs(rows: Sequence[MethodRow]) -> Table:
    table = _table("method", "cp rank", "messages", "received", "FLOPs", "scored/visible", "kept")
    for row in rows:
        if row.note:
            table.add_row(row.name, "", row.note)
        for cost in _first_middle_last(row.ranks):
            table.add_row(*_cost_cells(row.name, cost))
    return table


def _first_middle_last(ranks: Sequence[RankCost]) -> Sequence[RankCost]:
    """Return all ranks, if they are few."""
    return ranks if len(ranks) <= _RANKS_SHOWN else [ranks[0], ranks[len(ranks) // 2], ranks[-1]]


def _cost_cells(name: str, cost: RankCost) -> Iterator[str]:
    yield name
    yield str(cost.cp_rank)
    yield f"{cost.forward_messages} + {cost.backward_messages}"
    yield f"{_bytes(cost.forward_bytes)} + {_bytes(cost.backward_bytes)}"
    yield f"{_short(cost.forward_flops)} + {_short(cost.backward_flops)}"
    yield f"{cost.scored_entries / max(cost.visible_entries, 1):.3f}"
    yield _bytes(cost.saved_bytes)


def _refusals(rows: Sequence[MethodRow]) -> Table:
    table = _table("method", "serves", "why not the others")
    for row in rows:
        table.add_row(row.name, f"{row.serves} of {row.attentions}", escape("\n".join(row.refusals)))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _bytes(count: int) -> str:
    return f"{_short(count)}B"


def _short(number: int) -> str:
    value, unit = float(number), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{number} " if unit == 0 else f"{value:.3g} {_UNITS[unit]}"
