"""The section of a report that tells of a run: how it learned, how fast, where, with what."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lockstep.benchmark.amounts import NOTHING, count, digits, duration, num_bytes, plural, quantity
from lockstep.benchmark.report.content import Block, Cell, Column, Fact, Facts, Row, Section, Table, Text, Words
from lockstep.benchmark.report.plain import (
    as_text,
    core_list,
    git_words,
    number_in,
    records_in,
    table_of,
    time_words,
    version_facts,
)
from lockstep.benchmark.report.run_charts import learning_charts, speed_charts
from lockstep.benchmark.report.run_record import RunRecord

_STATUS = {
    "running": ("running", "neutral", "it trains, or its process was killed, which leaves no other word"),
    "finished": ("finished", "good", "all iterations are done"),
    "failed": ("failed", "bad", "it ended by an error"),
    "preempted": ("preempted", "neutral", "it was asked to stop, saved, and can go on"),
    "interrupted": ("interrupted", "neutral", "it was stopped by its user, saved, and can go on"),
}


def run_section(run: RunRecord, number: int) -> Section:
    """Return the section of the ``number``-th run, from 1 on."""
    prefix = f"run-{number}"
    status = str(run.progress.get("status", ""))
    badge, tone, meaning = _STATUS.get(status, ("unknown status", "bad", "progress.json does not tell"))
    return Section(
        identifier=prefix,
        title=run.task,
        subtitle=" · ".join(_when_and_where(run)),
        badge=badge,
        tone=_tone(tone),
        headline=_headline(run, badge, meaning),
        blocks=tuple(_blocks(run, prefix)),
    )


def _when_and_where(run: RunRecord) -> Iterator[str]:
    yield f"run {run.path}"
    if run.attempts:
        yield time_words(run.attempts[0].get("start_time"))
    hosts = dict.fromkeys(as_text(rank.get("host")) for rank in records_in(run.info, "ranks"))
    yield ", ".join(list(hosts)[:4] or [as_text(run.info.get("host"))]) + (" and more" if len(hosts) > 4 else "")


def _tone(word: str) -> Literal["good", "bad", "neutral"]:
    return "good" if word == "good" else "bad" if word == "bad" else "neutral"


def _blocks(run: RunRecord, prefix: str) -> Iterator[Block]:
    if run.notes:
        yield Words(tuple(("", note) for note in run.notes), title="Left out", tone="note")
    yield Facts(tuple(_key_facts(run)), large=True)
    yield from learning_charts(run, prefix)
    yield from speed_charts(run, prefix)
    yield from _last_metrics(run)
    yield from _ranks(run)
    yield from _attempts(run)
    yield Facts(tuple(_origin(run)), title="Where it ran")
    yield Facts(version_facts(run.info.get("versions")), title="Versions")
    if run.config:
        yield Text("Configuration (config.yaml)", run.config)


def _headline(run: RunRecord, badge: str, meaning: str) -> str:
    reason = run.progress.get("reason")
    why = f": {reason}" if reason else f" ({meaning})"
    done = _iterations(run)
    steps = quantity(env_steps_of(run), "env steps")
    return f"{badge[:1].upper()}{badge[1:]}{why}. {done}, {steps}, {duration(wall_s_of(run))} of training."


def _iterations(run: RunRecord) -> str:
    done, planned = number_in(run.progress, "iteration"), number_in(run.progress, "max_iterations")
    if done is None:
        done = run.last("iteration") or 0
    if planned is None:
        return plural(int(done), "iteration")
    return f"{int(done):,} of {plural(int(planned), 'iteration')}"


def env_steps_of(run: RunRecord) -> float | None:
    """Return how many env steps a run has taken, as it says itself or by its metrics."""
    told = number_in(run.progress, "env_steps")
    return run.last("env_steps") if told is None else told


def wall_s_of(run: RunRecord) -> float | None:
    """Return how many seconds a run has trained."""
    told = number_in(run.progress, "wall_s")
    return run.last("wall_s") if told is None else told


def _key_facts(run: RunRecord) -> Iterator[Fact]:
    for name, metric, explanation in (
        ("mean return", "mean_return", "of the episodes that ended last, with exploration"),
        ("evaluation", "eval/mean_return", "mean return without exploration, on envs of its own"),
    ):
        value = run.last(metric)
        if value is not None:
            yield Fact(name, Cell(digits(value), value), explanation)
    length = run.last("mean_episode_length")
    if length is not None:
        yield Fact("episode length", Cell(digits(length), length, unit="steps"), "mean of the episodes that ended last")
    overall = throughput_of(run)
    if overall is not None:
        yield Fact(
            "throughput",
            Cell(quantity(overall), overall, unit="env steps/s"),
            "all env steps over all rollouts and updates",
        )
    world_size = number_in(run.info, "world_size")
    if world_size is not None:
        yield Fact(
            "world size",
            Cell(plural(int(world_size), "rank"), int(world_size)),
            "processes, or devices with JAX",
        )


def throughput_of(run: RunRecord) -> float | None:
    """Return work over time: of each iteration steps_per_s says how long its env steps took."""
    steps, rates = run.columns.get("env_steps"), run.columns.get("steps_per_s")
    if steps is None or rates is None or steps.size < 2:
        return run.last("steps_per_s")
    # env_steps counts up; the first iteration began at 0, or where an earlier part is missing, nobody knows.
    own, own_rates = steps[1:] - steps[:-1], rates[1:]
    known = (own > 0) & (own_rates > 0)
    taken_s = float((own[known] / own_rates[known]).sum())
    return float(own[known].sum()) / taken_s if taken_s > 0 else run.last("steps_per_s")


def _last_metrics(run: RunRecord) -> Iterator[Table]:
    rows = []
    for name, values in run.columns.items():
        last = run.last(name)
        if last is not None and not name.startswith("time/"):
            num_known = int((values == values).sum())  # NaN is what isn't equal to itself
            rows.append(Row((Cell(name), Cell(f"{last:.6g}", last), Cell(count(num_known), num_known))))
    if rows:
        columns = (Column("metric", is_number=False), Column("newest value"), Column("iterations that have one"))
        yield Table(
            "Metrics", columns, tuple(rows), "As metrics.jsonl has them; docs/run-directory.md says what each is."
        )


def _ranks(run: RunRecord) -> Iterator[Table]:
    ranks = records_in(run.info, "ranks")
    if ranks:
        rows = [
            Row(
                (
                    Cell(as_text(each.get("rank"))),
                    Cell(as_text(each.get("host"))),
                    Cell(as_text(each.get("local_rank"))),
                    Cell(as_text(each.get("device"))),
                    Cell(core_list(each.get("cores"))),
                    Cell(as_text(each.get("visible_gpus"))),
                    Cell(as_text(each.get("pid"))),
                )
            )
            for each in ranks
        ]
        names = ("rank", "host", "local rank", "device", "cores", "visible GPUs", "process id")
        yield table_of("Ranks", names, rows, "A rank is one process on its device; cores are those it may run on.")


def _attempts(run: RunRecord) -> Iterator[Table]:
    rows = [
        Row(
            (
                Cell(str(number)),
                Cell(time_words(attempt.get("start_time"))),
                Cell(as_text(attempt.get("iteration"))),
                Cell(as_text(attempt.get("world_size"))),
                Cell(as_text(attempt.get("host"))),
                Cell(as_text(attempt.get("restart"))),
                Cell(as_text(attempt.get("num_requeues"))),
                Cell(" ".join(as_text(word) for word in _list(attempt.get("command")))),
            )
        )
        for number, attempt in enumerate(run.attempts, 1)
    ]
    if rows:
        names = ("attempt", "started", "from iteration", "ranks", "host", "restart", "requeues", "command")
        yield table_of("Attempts", names, rows, "Each start of the training's process; a resumed run has several.")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _origin(run: RunRecord) -> Iterator[Fact]:
    hardware = run.info.get("hardware")
    hardware = hardware if isinstance(hardware, Mapping) else {}
    yield Fact("host", Cell(as_text(run.info.get("host"))))
    yield Fact("platform", Cell(as_text(run.info.get("platform"))))
    yield Fact("CPU", Cell(as_text(hardware.get("cpu"))))
    yield Fact("cores", Cell(_cores(hardware)), "that the run may use, of those there are")
    yield Fact("memory", Cell(num_bytes(number_in(hardware, "memory_bytes"))))
    gpus = _list(hardware.get("gpus"))
    yield Fact("GPUs", Cell("; ".join(as_text(gpu) for gpu in gpus) if gpus else "none"))
    yield Fact("seed", Cell(as_text(run.info.get("seed"))))
    yield Fact("run id", Cell(as_text(run.info.get("run_id"))))
    yield Fact("git", Cell(git_words(run.info.get("git"))), "commit, and whether it was changed")


def _cores(hardware: Mapping[str, Any]) -> str:
    allowed, there = number_in(hardware, "num_allowed_cores"), number_in(hardware, "num_cores")
    if there is None:
        return NOTHING
    return f"{int(allowed):,} of {int(there):,}" if allowed is not None else f"{int(there):,}"
