"""The section of a report that puts bundles beside each other, as ``lockstep benchmark compare`` does."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from lockstep.benchmark.amounts import NOTHING, count, digits, per_rank, plural, rate, seconds, share
from lockstep.benchmark.comparison.compare import Comparison, Entry, Phase, compare
from lockstep.benchmark.comparison.screen import PARTS, ratio_words
from lockstep.benchmark.report.charts import Labels, Range, ranges_chart
from lockstep.benchmark.report.content import Block, Cell, Chart, Column, Row, Section, Table, Words
from lockstep.benchmark.schema import Bundle
from lockstep.core.errors import UsageError

_MAX_BARS = 40


def comparison_sections(named: Sequence[tuple[str, Bundle]]) -> Iterator[Section]:
    """Yield a comparison for each kind and task of which there are several bundles."""

    groups = [found for found in _groups(named) if len(found) > 1]
    for number, members in enumerate(groups, 1):
        yield _section(members, f"comparison-{number}")


def _groups(named: Sequence[tuple[str, Bundle]]) -> Iterator[list[tuple[str, Bundle]]]:
    """Yield the bundles of each kind and task; where not all of these did comparable work, those that did."""

    def kind_of(each: tuple[str, Bundle]) -> tuple[str, str]:
        return each[1].kind, each[1].run.task

    for _, found in groupby(sorted(named, key=kind_of), key=kind_of):
        members = list(found)
        if _are_comparable(members):
            yield members
            continue
        by_envs: dict[object, list[tuple[str, Bundle]]] = {}
        for each in members:
            by_envs.setdefault(each[1].num_envs_per_rank, []).append(each)
        if all(len(same) == 1 for same in by_envs.values()):
            yield members  # and the section says why not
        yield from by_envs.values()


def _are_comparable(members: Sequence[tuple[str, Bundle]]) -> bool:
    shares = {bundle.num_envs_per_rank for _, bundle in members}
    totals = {bundle.total_envs for _, bundle in members}
    return len(totals) == 1 or (len(shares) == 1 and isinstance(next(iter(shares)), int))


def _section(members: list[tuple[str, Bundle]], prefix: str) -> Section:
    names, bundles = [name for name, _ in members], [bundle for _, bundle in members]
    kind, task = bundles[0].kind, bundles[0].run.task
    title, subtitle = f"{task}: {plural(len(members), 'bundle')} compared", f"kind {kind}, compared with {names[0]}"
    try:
        try:
            comparison, rule = compare(bundles, names), "the same number of envs on every rank"
        except UsageError:
            if len({bundle.total_envs for bundle in bundles}) > 1:
                raise
            comparison, rule = compare(bundles, names, strong=True), "the same number of envs in total"
    except UsageError as error:
        note = Words((("", f"{error}."),), title="Not compared", tone="note")
        return Section(prefix, title, subtitle, badge=kind, blocks=(note,))
    headline = f"All bundles have {rule}. {_best(comparison)}".strip()
    return Section(prefix, title, subtitle, badge=kind, headline=headline, blocks=tuple(_blocks(comparison, prefix)))


def _best(comparison: Comparison) -> str:
    rated = [entry for entry in comparison.entries if entry.ratio is not None]
    if not rated:
        return ""
    best = max(rated, key=lambda entry: entry.ratio.value if entry.ratio else 0.0)
    assert best.ratio is not None
    if best is comparison.entries[0]:
        return f"None is faster than {best.name}."
    doubt = "" if best.ratio.clear else ", which is within the spread of the iterations"
    first = comparison.entries[0].name
    return f"The fastest is {best.name}: {best.ratio.value:.2f} times the throughput of {first}{doubt}."


def _blocks(comparison: Comparison, prefix: str) -> Iterator[Block]:
    if comparison.flags:
        yield Words(tuple(("", flag) for flag in comparison.flags), title="To be kept in mind", tone="note")
    if comparison.kind == "startup":
        yield _phase_table(comparison)
    else:
        yield from _throughput_chart(comparison, prefix)
        yield _share_table(comparison)
        yield _throughput_table(comparison)
    findings = tuple((entry.name, found.words) for entry in comparison.entries for found in entry.findings)
    if findings:
        yield Words(findings, title="Findings", tone="finding")
    if comparison.differences:
        yield _difference_table(comparison)
    else:
        yield Words((("", "Versions, hardware and settings are the same."),), title="What else is different")


def _throughput_chart(comparison: Comparison, prefix: str) -> Iterator[Chart]:
    entries = [entry for entry in comparison.entries if entry.iteration_rate is not None][:_MAX_BARS]
    if not entries:
        return
    ranges = [
        Range(entry.name, entry.iteration_rate.p10, entry.steps_per_s or 0.0, entry.iteration_rate.p90)
        for entry in entries
        if entry.iteration_rate is not None
    ]
    yield Chart(
        "Throughput",
        ranges_chart(
            ranges,
            Labels("env steps/s"),
            "; ".join(f"{each.name}: {rate(each.middle)}" for each in ranges),
            f"{prefix}-rates",
        ),
        "Bar and dot: env steps of all ranks over the time of the slowest. Line: p10 to p90 of single iterations.",
    )


def _throughput_table(comparison: Comparison) -> Table:
    columns = (
        Column("bundle", is_number=False),
        Column("throughput", "", "env steps of all ranks over the time of the slowest"),
        Column("ratio", "", "to the first"),
        Column("spread of the ratio", "", "slow iterations (p10) over the first's fast ones (p90), and the reverse"),
        Column("iteration, median"),
        Column("p10", "", "a tenth of the iterations take less"),
        Column("p90", "", "a tenth of the iterations take longer"),
        Column("ranks"),
        Column("nodes"),
        Column("envs per rank"),
        Column("envs"),
    )
    return Table("Throughput, in figures", columns, tuple(_throughput_row(entry) for entry in comparison.entries))


def _throughput_row(entry: Entry) -> Row:
    ratio, spread = ratio_words(entry.ratio)
    times = entry.iteration_s
    return Row(
        (
            Cell(entry.name),
            Cell(rate(entry.steps_per_s), entry.steps_per_s),
            Cell(ratio, None if entry.ratio is None else entry.ratio.value),
            Cell(spread),
            *(Cell(seconds(each), each) for each in ((times.median, times.p10, times.p90) if times else (None,) * 3)),
            Cell(count(entry.world_size), entry.world_size),
            Cell(count(entry.num_nodes), entry.num_nodes),
            Cell(per_rank(entry.num_envs_per_rank)),
            Cell(count(entry.total_envs), entry.total_envs),
        )
    )


def _share_table(comparison: Comparison) -> Table:
    columns = (
        Column("bundle", is_number=False),
        *(Column(name.replace("_", " "), "", why) for name, why in PARTS.items()),
    )
    rows = tuple(
        Row((Cell(entry.name), *(_share_cell(entry.shares, name) for name in PARTS))) for entry in comparison.entries
    )
    return Table("Where a mean iteration goes", columns, rows, wide=False)


def _share_cell(shares: dict[str, float] | None, name: str) -> Cell:
    return Cell(NOTHING) if shares is None else Cell(share(shares[name]), shares[name])


def _phase_table(comparison: Comparison) -> Table:
    names = dict.fromkeys(phase.name for entry in comparison.entries for phase in entry.phases)
    columns = [Column("phase", is_number=False)]
    columns += [Column(f"{entry.name}, {kind}") for entry in comparison.entries for kind in ("cold", "warm")]
    rows = tuple(
        Row((Cell(name), *(cell for entry in comparison.entries for cell in _phase_cells(entry, name))))
        for name in names
    )
    explanation = "Median over ranks; below it, how many times that of the first."
    return Table("Phases of a start", tuple(columns), rows, explanation)


def _phase_cells(entry: Entry, name: str) -> Iterator[Cell]:
    phase: Phase | None = next((each for each in entry.phases if each.name == name), None)
    figures = ((phase.cold_s, phase.cold_ratio), (phase.warm_s, phase.warm_ratio)) if phase else ((None, None),) * 2
    for value, ratio in figures:
        beside = "" if ratio is None else f"x {digits(ratio)}"
        yield Cell(seconds(value), value, beside, ratio)


def _difference_table(comparison: Comparison) -> Table:
    columns = [Column("fact", is_number=False), Column("area", is_number=False)]
    columns += [Column(entry.name, is_number=False) for entry in comparison.entries]
    rows = tuple(
        Row((Cell(each.name), Cell(each.area), *(Cell(value) for value in each.values)))
        for each in comparison.differences
    )
    return Table("What else is different", tuple(columns), rows, "What could be the reason, apart from what was meant.")
