"""The section of a report that tells of a scaling sweep: how throughput grew with the ranks, and what was lost."""

from collections.abc import Iterator

import numpy as np

from lockstep.benchmark.amounts import NOTHING, count, per_rank, plural, quantity, rate, seconds, share
from lockstep.benchmark.comparison.compare import shares_of
from lockstep.benchmark.comparison.screen import PARTS
from lockstep.benchmark.report.charts import Labels, Line, columns_chart, lines_chart
from lockstep.benchmark.report.content import Block, Cell, Chart, Column, Fact, Facts, Key, Row, Section, Table, Words
from lockstep.benchmark.report.place_tables import node_table
from lockstep.benchmark.report.plain import time_words, version_facts
from lockstep.benchmark.scaling.result import CountResult, ScalingResult

_MODES = {
    "weak": "as many envs on every rank, whatever the number of ranks",
    "strong": "as many envs in total, whatever the number of ranks",
}
_ROLES = {
    "compute": "compute",
    "contention": "contention",
    "straggler_wait": "straggler",
    "communication": "communication",
}


def scaling_section(result: ScalingResult, name: str, number: int) -> Section:
    """Return the section of the ``number``-th sweep, from 1 on.

    Args:
        result: what to tell of.
        name: of it, as the user knows it.
        number: among the sweeps of the page.
    """
    prefix = f"scaling-{number}"
    hosts = ", ".join(dict.fromkeys(node.host for node in result.hardware))
    largest = result.counts[-1]
    headline = f"{rate(largest.mean_steps_per_s)} with {plural(largest.world_size, 'rank')}. {largest.verdict}"
    return Section(
        identifier=prefix,
        title=f"{result.task}: {result.mode} scaling",
        subtitle=f"{name} · {_MODES[result.mode]} · {time_words(result.date)} · {hosts}",
        badge=f"{result.counts[0].world_size} to {plural(largest.world_size, 'rank')}",
        headline=headline,
        blocks=tuple(_blocks(result, prefix)),
    )


def _blocks(result: ScalingResult, prefix: str) -> Iterator[Block]:
    yield _throughput_chart(result, prefix)
    yield from _split_chart(result, prefix)
    yield _table(result)
    yield Words(
        tuple(_sentences(result)),
        title="Why it does not scale better",
        tone="finding",
        explanation="Shares are those of a mean iteration that it costs, in the round with the median throughput.",
    )
    yield from _loss_table(result)
    yield node_table(result.hardware)
    words = (
        ("framework", result.ml_framework),
        ("RL library", result.rl_library),
        ("algorithm", result.algorithm),
        ("engine", result.engine),
        ("device", result.device),
        ("dtype", result.dtype),
        ("order of the jobs", "; ".join(", ".join(str(each) for each in jobs) for jobs in result.order)),
        ("command", " ".join(result.command)),
    )
    yield Facts(tuple(Fact(name, Cell(word)) for name, word in words), title="What was run")
    versions = result.versions
    others = {"driver": versions.driver, "CUDA": versions.cuda, "NCCL": versions.nccl}
    yield Facts(version_facts({"python": versions.python, **versions.packages, **others}), title="Versions")


def _sentences(result: ScalingResult) -> Iterator[tuple[str, str]]:
    for each in result.counts:
        yield "", each.verdict
        for finding in each.findings:
            if finding.reason != "nothing_lost":
                yield f"{plural(each.world_size, 'rank')}, {share(finding.lost_share)}", finding.words


def _throughput_chart(result: ScalingResult, prefix: str) -> Chart:
    ranks = np.asarray([each.world_size for each in result.counts], dtype=np.float64)
    ideal = np.asarray([each.ideal_steps_per_s for each in result.counts])
    measured = np.asarray([each.mean_steps_per_s for each in result.counts])
    words = ", ".join(f"{each.world_size}: {rate(each.mean_steps_per_s)}" for each in result.counts)
    lines = [
        Line("ideal", ranks, ideal, "series-8", with_points=True),
        Line("measured", ranks, measured, "series-1", with_points=True),
    ]
    svg = lines_chart(
        lines, Labels("ranks", "env steps/s"), f"Throughput by ranks: {words}", f"{prefix}-rate", zero=True
    )
    keys = (
        Key("series-1", "measured", explanation="env steps of all ranks over the time of the slowest"),
        Key("series-8", "ideal", explanation="that of the smallest job, in proportion to the ranks"),
    )
    return Chart("Throughput", svg, f"Of {plural(len(result.order), 'round')} of all jobs together.", keys)


def _split_chart(result: ScalingResult, prefix: str) -> Iterator[Chart]:
    known = [(each, each.split) for each in result.counts if each.split is not None]
    if not known:
        return
    by_part = {
        _ROLES[name]: np.asarray([getattr(split, f"{name}_s") for _, split in known], dtype=np.float64)
        for name in PARTS
    }
    words = "; ".join(
        f"{plural(each.world_size, 'rank')}: "
        + ", ".join(f"{name.replace('_', ' ')} {share(part)}" for name, part in shares_of(split).items())
        for each, split in known
    )
    yield Chart(
        "Where the time goes",
        columns_chart(
            by_part,
            Labels("ranks", "time of a mean iteration", y_unit="s"),
            f"Parts of a mean iteration, {words}",
            f"{prefix}-split",
            names=[str(each.world_size) for each, _ in known],
        ),
        "A mean iteration, mean over ranks and rounds.",
        tuple(Key(_ROLES[name], name.replace("_", " "), explanation=why) for name, why in PARTS.items()),
    )


def _table(result: ScalingResult) -> Table:
    columns = (
        Column("ranks"),
        Column("throughput", "", "env steps of all ranks over the time of the slowest"),
        Column("efficiency", "", "throughput over the ideal: 100 % where nothing is lost"),
        Column("its interval", "", f"which holds the true one with a confidence of {share(result.confidence)}"),
        Column("ideal", "", "throughput of the smallest job, in proportion to the ranks"),
        *(Column(name.replace("_", " "), "", f"share of a mean iteration: {why}") for name, why in PARTS.items()),
        Column("CPU time", "", "of a rank in a mean iteration"),
        Column("envs per rank"),
        Column("envs"),
    )
    return Table("By number of ranks", columns, tuple(_row(each) for each in result.counts))


def _row(one: CountResult) -> Row:
    efficiency, shares = one.efficiency, None if one.split is None else shares_of(one.split)
    known = efficiency.low is not None and efficiency.high is not None
    return Row(
        (
            Cell(count(one.world_size), one.world_size),
            Cell(rate(one.mean_steps_per_s), one.mean_steps_per_s),
            Cell(share(efficiency.mean), efficiency.mean),
            Cell(f"{share(efficiency.low)} to {share(efficiency.high)}" if known else NOTHING),
            Cell(quantity(one.ideal_steps_per_s), one.ideal_steps_per_s),
            *(Cell(NOTHING) if shares is None else Cell(share(shares[name]), shares[name]) for name in PARTS),
            Cell(seconds(one.cpu_s), one.cpu_s),
            Cell(per_rank(one.num_envs_per_rank)),
            Cell(count(one.total_envs), one.total_envs),
        )
    )


def _loss_table(result: ScalingResult) -> Iterator[Table]:
    known = [(each, each.losses) for each in result.counts if each.losses is not None]
    if not known:
        return
    whys = {
        "total": "1 less the efficiency",
        "compute": "ranks compute longer",
        "contention": "ranks lack cores",
        "straggler_wait": "ranks wait for later ones",
        "communication": "exchanges take long after the last rank has come",
        "rest": "what no part of the iteration accounts for",
    }
    columns = (Column("ranks"), *(Column(name.replace("_", " "), "", why) for name, why in whys.items()))
    rows = tuple(
        Row(
            (
                Cell(count(each.world_size), each.world_size),
                *(Cell(share(getattr(losses, name)), getattr(losses, name)) for name in whys),
            )
        )
        for each, losses in known
    )
    explanation = "As shares of the ideal throughput; below 0, less is lost than in the smallest job."
    yield Table("What is lost", columns, rows, explanation)
