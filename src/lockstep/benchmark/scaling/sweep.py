"""How throughput grows with the number of ranks: the jobs of a sweep, one after another, and what comes of them.

Rounds alternate between rising and falling numbers of ranks, so that a machine that grows slower meanwhile (by heat, or
by what else runs) does not make the larger jobs look worse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from scipy import stats

from lockstep.benchmark.amounts import plural
from lockstep.benchmark.scaling.reasons import losses_of, reasons_at, verdict_of
from lockstep.benchmark.scaling.result import CountResult, Interval, ScalingResult
from lockstep.benchmark.schema import Bundle, Runtime, TimeSplit
from lockstep.core.errors import LockstepError, RunError

CONFIDENCE = 0.95

RunCount = Callable[[int, Path], Bundle]
"""Runs the benchmark on so many GPUs (or processes on CPU cores), has it write its bundle there, and returns that."""


@dataclass(frozen=True)
class Sweep:
    """What is to be measured."""

    counts: tuple[int, ...]
    """Values of ``--num_gpus``, two at least, the smallest first."""
    rounds: int
    is_strong: bool
    """As many envs in every job, however many ranks; else on every rank."""
    command: tuple[str, ...] = ()
    """Words of the command line, for the record."""


@dataclass(frozen=True)
class Job:
    """One of the jobs of a sweep."""

    num_gpus: int
    round: int
    bundle: Bundle
    name: str
    """Of the bundle's file."""


def order_of(sweep: Sweep) -> tuple[tuple[int, ...], ...]:
    """Return the counts of each round, in the order in which they are run."""
    return tuple(sweep.counts[:: 1 if number % 2 == 0 else -1] for number in range(sweep.rounds))


def run_sweep(
    sweep: Sweep,
    run_count: RunCount,
    folder: Path,
    say: Callable[[str], None],
    keep: Callable[[ScalingResult], None],
) -> ScalingResult:
    """Run all jobs and return what comes of them; ``keep`` is called with it, too.

    Where a job fails, ``keep`` gets the result of the rounds that are whole, if there is one; bundles stay as they are.

    Args:
        sweep: what to measure.
        run_count: runs one job.
        folder: of the bundles.
        say: shows a line.
        keep: writes a result.

    Raises:
        LockstepError: what a job has raised, or that its bundle does not compare with the others.
    """
    jobs: list[Job] = []
    try:
        for number, counts in enumerate(order_of(sweep)):
            for count in counts:
                name = f"gpus_{count}_round_{number + 1}.json"
                say(f"round {number + 1} of {sweep.rounds}: --num_gpus {count}")
                job = Job(count, number, run_count(count, folder / name), name)
                _check_envs(sweep, (jobs or [job])[0], job)
                jobs.append(job)
    except LockstepError as error:
        raise _with_what_is_kept(sweep, jobs, keep, folder, error) from error
    result = result_of(sweep, jobs)
    keep(result)
    return result


def _with_what_is_kept(
    sweep: Sweep, jobs: Sequence[Job], keep: Callable[[ScalingResult], None], folder: Path, error: LockstepError
) -> LockstepError:
    """Keep the result of the whole rounds, and return the error with where bundles and result are."""
    whole = len(jobs) // len(sweep.counts)
    bundles = plural(len(jobs), "bundle")
    if not jobs:
        return error
    if not whole:
        return type(error)(f"{error}; {bundles} made before can be found in {folder}")
    kept = [job for job in jobs if job.round < whole]
    keep(result_of(Sweep(sweep.counts, whole, sweep.is_strong, sweep.command), kept))
    rounds = plural(whole, "whole round")
    return type(error)(f"{error}; {bundles} made before and the result of {rounds} can be found in {folder}")


def _check_envs(sweep: Sweep, first: Job, job: Job) -> None:
    """Refuse a job that has not done what makes it comparable with the first."""
    name = "total_envs" if sweep.is_strong else "num_envs_per_rank"
    here, there = getattr(job.bundle, name), getattr(first.bundle, name)
    if here != there:
        what = "equal totals" if sweep.is_strong else "equal numbers on every rank"
        raise RunError(
            f"--num_gpus {job.num_gpus} ran {name} {here}, --num_gpus {first.num_gpus} {there}; a sweep compares {what}"
        )


def result_of(sweep: Sweep, jobs: Sequence[Job]) -> ScalingResult:
    """Return what comes of the jobs of whole rounds.

    Raises:
        RunError: they have no rates, or the numbers of ranks are not different.
    """
    by_count = {
        count: sorted((job for job in jobs if job.num_gpus == count), key=lambda job: job.round)
        for count in sweep.counts
    }
    sizes = [by_count[count][0].bundle.world_size for count in sweep.counts]
    if len(set(sizes)) < len(sizes):
        raise RunError(f"--num_gpus {','.join(map(str, sweep.counts))} ran {sizes} ranks, which does not compare")
    smallest = by_count[sweep.counts[0]]
    run = jobs[0].bundle.run
    return ScalingResult(
        schema_version=1,
        kind="scaling",
        mode="strong" if sweep.is_strong else "weak",
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=sweep.command,
        task=run.task,
        ml_framework=run.ml_framework,
        rl_library=run.rl_library,
        algorithm=run.algorithm,
        engine=run.engine,
        device=run.device,
        dtype=run.dtype,
        confidence=CONFIDENCE,
        order=order_of(sweep),
        hardware=smallest[0].bundle.hardware,
        versions=smallest[0].bundle.versions,
        counts=tuple(_count_result(by_count[count], smallest, sweep.is_strong) for count in sweep.counts),
    )


def _count_result(jobs: Sequence[Job], smallest: Sequence[Job], is_strong: bool) -> CountResult:
    bundle, first = jobs[0].bundle, smallest[0].bundle
    growth = bundle.world_size / first.world_size
    rates = [_rate(job) for job in jobs]
    efficiency = interval_of(
        [rate / (growth * _rate(other)) for rate, other in zip(rates, smallest, strict=True)], CONFIDENCE
    )
    # A rank's share of the work, beside that of a rank of the smallest job: 1 in weak scaling.
    work = bundle.total_envs / first.total_envs / growth
    split, base_split = _mean_split(jobs), _mean_split(smallest)
    cpu_s, base_cpu_s = _mean_cpu_s(jobs), _mean_cpu_s(smallest)
    losses = None
    if jobs is not smallest and split is not None and base_split is not None:
        losses = losses_of(split, base_split, work, 1 - efficiency.mean)
    median = sorted(jobs, key=_rate)[(len(jobs) - 1) // 2].bundle
    more_cpu_s = None if cpu_s is None or base_cpu_s is None else cpu_s - work * base_cpu_s
    return CountResult(
        num_gpus=jobs[0].num_gpus,
        world_size=bundle.world_size,
        num_envs_per_rank=bundle.num_envs_per_rank,
        total_envs=bundle.total_envs,
        bundles=tuple(job.name for job in jobs),
        steps_per_s=tuple(rates),
        mean_steps_per_s=_joint_rate(jobs),
        ideal_steps_per_s=growth * _joint_rate(smallest),
        efficiency=efficiency,
        split=split,
        cpu_s=cpu_s,
        losses=losses,
        findings=reasons_at(median, first, losses, split, more_cpu_s, is_strong),
        verdict=verdict_of(bundle.world_size, first.world_size, efficiency, losses),
    )


def interval_of(values: Sequence[float], confidence: float) -> Interval:
    """Return the mean of values, which are never below 0, and its confidence interval by Student's t distribution."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean=mean, low=None, high=None)
    error = float(np.std(values, ddof=1)) / np.sqrt(len(values))
    reach = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * error
    return Interval(mean=mean, low=max(0.0, mean - reach), high=mean + reach)


def _rate(job: Job) -> float:
    return _runtime(job.bundle).steps_per_s


def _joint_rate(jobs: Sequence[Job]) -> float:
    runtimes = [_runtime(job.bundle) for job in jobs]
    return sum(each.env_steps for each in runtimes) / sum(each.wall_s for each in runtimes)


def _runtime(bundle: Bundle) -> Runtime:
    if bundle.runtime is None:
        raise RunError(f"a bundle of kind {bundle.kind} has no throughput; scaling needs those of training")
    return bundle.runtime


def _mean_split(jobs: Sequence[Job]) -> TimeSplit | None:
    splits = [_runtime(job.bundle).split for job in jobs]
    known = [split.model_dump() for split in splits if split is not None]
    if len(known) < len(splits):
        return None
    return TimeSplit(**{name: float(np.mean([split[name] for split in known])) for name in TimeSplit.model_fields})


def _mean_cpu_s(jobs: Sequence[Job]) -> float | None:
    uses = [each.cpu_s for job in jobs for each in job.bundle.ranks]
    known = [use.mean for use in uses if use is not None]
    return float(np.mean(known)) if len(known) == len(uses) else None
