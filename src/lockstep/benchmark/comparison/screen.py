"""A comparison in a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep.benchmark.amounts import NOTHING, digits, per_rank, plural, quantity, seconds, share
from lockstep.benchmark.comparison.compare import Comparison, Entry, Ratio

WIDTH = 120
"""Columns, where the terminal does not say how many it has."""

PARTS = {
    "compute": "own work",
    "contention": "ready, but something else had the core",
    "straggler_wait": "waiting for ranks that came later",
    "communication": "exchanging, after the last had come",
}
"""What the parts of an iteration are, in a few words."""

_SPEED = ("env steps/s", "ratio", "spread", "iteration\np10", "\nmedian", "\np90")


def render(comparison: Comparison) -> RenderableType:
    """Return what a terminal is to show of a comparison; print it on a console without markup."""
    return Group(*_parts(comparison))


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    first, others = comparison.entries[0], plural(len(comparison.entries), "bundle")
    same = "equal in total" if comparison.strong else "equal on every rank"
    yield Text(f"{comparison.kind} of {comparison.task}: {others}, compared with {first.name}; envs {same}")
    for flag in comparison.flags:
        yield Text(f"note: {flag}", style="yellow")
    if comparison.kind == "startup":
        yield from _block("median start over ranks, and how many times the first's", _phases(comparison))
    else:
        yield from _block("throughput of all ranks together, over the slowest rank's time", _throughputs(comparison))
        yield Text("  spread: slow iterations (p10) over the first's fast ones (p90), and the reverse", style="dim")
        if any(entry.shares for entry in comparison.entries):
            yield from _block("where a mean iteration goes", _shares(comparison))
    if any(entry.findings for entry in comparison.entries):
        yield from _block("findings", _findings(comparison))
    if comparison.differences:
        yield from _block("what else is different", _differences(comparison))
    else:
        yield Text("\nversions, hardware and settings are the same")


def _block(title: str, table: Table) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", style="bold")
    yield Padding(table, (0, 0, 0, 2), expand=False)


def _table(*numbers: str, name: str = "bundle", no_wrap: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(name, overflow="fold", min_width=8)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=no_wrap)
    return table


def _throughputs(comparison: Comparison) -> Table:
    table = _table("ranks", "nodes", "envs/rank", "envs", *_SPEED)
    for entry in comparison.entries:
        spread = entry.iteration_s
        table.add_row(
            entry.name,
            str(entry.world_size),
            str(entry.num_nodes),
            per_rank(entry.num_envs_per_rank, at_most=2),
            f"{entry.total_envs:,}",
            quantity(entry.steps_per_s),
            *ratio_words(entry.ratio),
            *(seconds(each) for each in ((spread.p10, spread.median, spread.p90) if spread else (None,) * 3)),
        )
    return table


def ratio_words(ratio: Ratio | None) -> tuple[str, str]:
    """Return a ratio and its spread, with ``no clear difference`` where 1 is inside of it."""
    if ratio is None:
        return NOTHING, NOTHING
    if ratio.low == ratio.high == 1:
        return "1", "the first"
    spread = f"{ratio.low:.2f} to {ratio.high:.2f}"
    return f"{ratio.value:.2f}", spread if ratio.clear else f"{spread}, unclear"


def _shares(comparison: Comparison) -> Table:
    table = _table(*(name.replace("_", " ") for name in PARTS))
    for entry in comparison.entries:
        shares = entry.shares
        table.add_row(entry.name, *(share(shares[name] if shares else None) for name in PARTS))
    return table


def _findings(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(overflow="fold", min_width=8)
    table.add_column(overflow="fold", ratio=1)
    for entry in comparison.entries:
        for number, finding in enumerate(entry.findings):
            table.add_row(entry.name if number == 0 else "", finding.words)
        if not entry.findings:
            table.add_row(entry.name, "none")
    return table


def _phases(comparison: Comparison) -> Table:
    names = dict.fromkeys(phase.name for entry in comparison.entries for phase in entry.phases)
    table = _table(
        *(f"{entry.name} {kind}" for entry in comparison.entries for kind in ("cold", "warm")),
        name="phase",
        no_wrap=False,
    )
    for name in names:
        table.add_row(name, *(cell for entry in comparison.entries for cell in _phase_cells(comparison, entry, name)))
    return table


def _phase_cells(comparison: Comparison, entry: Entry, name: str) -> Iterator[str]:
    phase = next((each for each in entry.phases if each.name == name), None)
    figures = ((phase.cold_s, phase.cold_ratio), (phase.warm_s, phase.warm_ratio)) if phase else ((None, None),) * 2
    for value, ratio in figures:
        beside = "" if ratio is None or entry is comparison.entries[0] else f" x{digits(ratio)}"
        yield f"{seconds(value)}{beside}"


def _differences(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "", *(entry.name for entry in comparison.entries)):
        table.add_column(name, overflow="fold")
    area = ""
    for difference in comparison.differences:
        table.add_row(difference.area if difference.area != area else "", difference.name, *difference.values)
        area = difference.area
    return table
