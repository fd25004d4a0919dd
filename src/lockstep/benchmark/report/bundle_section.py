"""The section of a report that tells of a result bundle."""

from collections.abc import Iterator

import yaml

from lockstep.benchmark.amounts import (
    NOTHING,
    count,
    digits,
    duration,
    num_bytes,
    per_rank,
    plural,
    quantity,
    rate,
    rate_scale,
    seconds,
    share,
)
from lockstep.benchmark.comparison.facts import describe_nodes
from lockstep.benchmark.report.bundle_charts import learning_chart, rank_chart, split_of_time, spread_of_iterations
from lockstep.benchmark.report.content import Block, Cell, Column, Fact, Facts, Row, Section, Table, Text, Words
from lockstep.benchmark.report.place_tables import device_table, exchange_table, node_table
from lockstep.benchmark.report.plain import git_words, time_words
from lockstep.benchmark.report.rank_table import rank_table
from lockstep.benchmark.report.startup_blocks import startup_blocks
from lockstep.benchmark.schema import Bundle, Finding, Learning, Runtime

_KINDS = {
    "startup": "start-up",
    "runtime": "runtime with random actions",
    "training": "training",
}


def bundle_section(bundle: Bundle, name: str, number: int) -> Section:
    """Return the section of the ``number``-th bundle, from 1 on.

    Args:
        bundle: what to tell of.
        name: of it, as the user knows it.
        number: among the bundles of the page.
    """
    prefix = f"bundle-{number}"
    return Section(
        identifier=prefix,
        title=f"{bundle.run.task}: {_KINDS[bundle.kind]}",
        subtitle=f"{name} · {time_words(bundle.run.date)} · {_hosts(bundle)}",
        badge=plural(bundle.world_size, "rank"),
        headline=_headline(bundle),
        blocks=tuple(_blocks(bundle, prefix)),
    )


def _hosts(bundle: Bundle) -> str:
    hosts = list(dict.fromkeys(node.host for node in bundle.hardware))
    return ", ".join(hosts) if len(hosts) <= 4 else f"{', '.join(hosts[:3])} and {len(hosts) - 3} more hosts"


def _headline(bundle: Bundle) -> str:
    where = f"{plural(bundle.world_size, 'rank')} on {plural(bundle.num_nodes, 'node')}"
    hardware = "; ".join(describe_nodes(bundle.hardware))
    if bundle.runtime is None:
        total = next((each for each in (bundle.startup.phases if bundle.startup else ()) if each.name == "total"), None)
        spread = total and (total.warm_s or total.cold_s)
        took = (
            f"{seconds(spread.median)} from a {'warm' if total and total.warm_s else 'cold'} start"
            if spread
            else "start"
        )
        return f"{took} to the first iteration, median of {where} ({hardware}) that start together."
    runtime = bundle.runtime
    return (
        f"{rate(runtime.steps_per_s)} by {where} ({hardware}) with {count(bundle.total_envs)} envs: "
        f"{quantity(runtime.env_steps, 'env steps')} of all ranks in {duration(runtime.wall_s)} of the slowest."
    )


def _is_loss(finding: Finding) -> bool:
    return finding.lost_share > 0 and finding.reason != "nothing_lost"


def _blocks(bundle: Bundle, prefix: str) -> Iterator[Block]:
    if bundle.findings:
        yield Words(
            tuple((share(each.lost_share) if each.lost_share else "", each.words) for each in bundle.findings),
            title="Why it is not faster" if any(_is_loss(each) for each in bundle.findings) else "Findings",
            tone="finding",
            explanation="With the share of a mean iteration that each costs, mean over ranks.",
        )
    if bundle.runtime is not None:
        yield Facts(tuple(_key_facts(bundle, bundle.runtime)), large=True)
        yield from split_of_time(bundle.runtime, prefix)
        yield from rank_chart(bundle, prefix)
        yield spread_of_iterations(bundle.runtime, prefix)
    if bundle.startup is not None:
        yield from startup_blocks(bundle.startup, prefix)
    yield from learning_chart(bundle, prefix)
    if bundle.learning is not None:
        yield from _metrics(bundle.learning)
    yield rank_table(bundle)
    if bundle.runtime is not None:
        yield from exchange_table(bundle.runtime)
    yield from device_table(bundle)
    yield node_table(bundle.hardware)
    yield from _facts(bundle)
    yield Text("Configuration", yaml.safe_dump(bundle.run.config, sort_keys=False, allow_unicode=True))


def _key_facts(bundle: Bundle, runtime: Runtime) -> Iterator[Fact]:
    rates, scale = runtime.iteration_steps_per_s, rate_scale(runtime.steps_per_s)
    overall = Cell(digits(runtime.steps_per_s / scale.size), runtime.steps_per_s, unit=scale.unit)
    yield Fact("throughput", overall, "of all ranks, over the slowest rank's time")
    spread = f"{digits(rates.p10 / scale.size)} to {digits(rates.p90 / scale.size)}"
    yield Fact("of single iterations", Cell(spread, unit=scale.unit), "p10 to p90: eight tenths of them")
    median = runtime.iteration_s.median
    yield Fact("median iteration", Cell(seconds(median), median), "by its slowest rank")
    shares = per_rank(bundle.num_envs_per_rank)
    yield Fact("envs", Cell(count(bundle.total_envs), bundle.total_envs), f"{shares} on each rank")
    yield Fact("iterations", Cell(count(runtime.iterations), runtime.iterations), "measured, after the warm-up")
    warm_up = runtime.warm_up
    compiling = "" if warm_up.compile_s is None else f", {seconds(warm_up.compile_s)} of it compiling"
    yield Fact(
        "warm-up",
        Cell(seconds(warm_up.wall_s), warm_up.wall_s),
        f"{plural(warm_up.iterations, 'iteration')}{compiling}; in no other figure",
    )


def _facts(bundle: Bundle) -> Iterator[Block]:
    run, versions = bundle.run, bundle.versions
    words = [
        ("framework", run.ml_framework),
        ("RL library", run.rl_library),
        ("algorithm", run.algorithm),
        ("engine", run.engine),
        ("device", run.device),
        ("dtype", run.dtype),
        ("seed", str(run.seed)),
        ("world size", plural(bundle.world_size, "rank")),
        ("local world size", plural(bundle.local_world_size, "rank")),
        ("nodes", str(bundle.num_nodes)),
        ("processes", str(bundle.num_processes)),
        ("benchmark id", run.benchmark_id),
        ("command", " ".join(run.command)),
    ]
    words += [(name, word) for name, word in _artifacts(bundle) if word is not None]
    yield Facts(tuple(Fact(name, Cell(word)) for name, word in words), title="What was run")
    packages = {"python": versions.python, **versions.packages}
    found = [*packages.items(), ("driver", versions.driver), ("CUDA", versions.cuda), ("NCCL", versions.nccl)]
    git = [] if run.git is None else [("git", git_words(run.git))]
    yield Facts(tuple(Fact(name, Cell(word)) for name, word in [*found, *git] if word), title="Versions")
    if bundle.learning is not None:
        yield Facts(tuple(_learning_facts(bundle.learning)), title="Learning")
    scopes = ("workload_scope", "measurement_scope", "gpu_measurement_scope")
    yield Facts(
        tuple(
            Fact(name.replace("_", " "), Cell(value), bundle.scope_values.get(name, {}).get(value, ""))
            for name in scopes
            for value in [str(getattr(bundle, name))]
        ),
        title="What the figures cover",
    )
    yield from _work(bundle)


def _artifacts(bundle: Bundle) -> tuple[tuple[str, str | None], ...]:
    return ("video", bundle.artifacts.video), ("env sensors", bundle.artifacts.env_sensors)


def _learning_facts(learning: Learning) -> Iterator[Fact]:
    yield Fact("env steps", Cell(count(learning.env_steps), learning.env_steps), "of all ranks, warm-up included")
    if learning.mean_return is not None:
        yield Fact(
            "mean return", Cell(digits(learning.mean_return), learning.mean_return), "of the episodes that ended last"
        )
    if learning.success is not None:
        success = learning.success
        word = "reached" if success.reached else "not reached"
        yield Fact(
            "success",
            Cell(word),
            f"mean return of an evaluation {digits(success.mean_return)}, needed {digits(success.needed_return)}",
        )


def _metrics(learning: Learning) -> Iterator[Table]:
    rows = tuple(
        Row((Cell(name), Cell(NOTHING if value is None else f"{value:.6g}", value)))
        for name, value in learning.metrics.items()
    )
    if rows:
        columns = (Column("metric", is_number=False), Column("value"))
        yield Table("Metrics of the last iteration", columns, rows, "As metrics.jsonl of a run has them.", wide=False)


def _work(bundle: Bundle) -> Iterator[Facts]:
    work = bundle.work
    if work is not None:
        words = (
            ("steps per env", count(work.num_steps_per_env), work.num_steps_per_env, "in one rollout"),
            ("learning epochs", count(work.num_learning_epochs), work.num_learning_epochs, ""),
            ("mini-batches", count(work.num_mini_batches), work.num_mini_batches, "in each epoch"),
            ("parameters", count(work.num_parameters), work.num_parameters, "that are trained"),
            ("per action", quantity(work.flops_per_action, "FLOP"), work.flops_per_action, "of the networks, forward"),
            ("per sample", quantity(work.flops_per_sample, "FLOP"), work.flops_per_sample, "of the networks, forward"),
        )
        yield Facts(
            tuple(Fact(name, Cell(text, exact), why) for name, text, exact, why in words), title="Work of an iteration"
        )
    memory = [node.memory_bytes for node in bundle.hardware]
    if len(memory) > 1:
        yield Facts((Fact("main memory", Cell(num_bytes(sum(memory)), sum(memory)), "of all nodes"),), title="Together")
