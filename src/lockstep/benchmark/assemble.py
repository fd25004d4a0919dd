"""From what all processes have measured to one bundle."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import numpy as np

from lockstep.benchmark.hardware import installed
from lockstep.benchmark.process_report import OwnRank, ProcessReport
from lockstep.benchmark.reasons.find import find_reasons
from lockstep.benchmark.resources import Interval
from lockstep.benchmark.schema import (
    SCHEMA_VERSION,
    SCOPE_VALUES,
    Bundle,
    DeviceUse,
    Finding,
    Kind,
    Learning,
    NodeHardware,
    RankFigures,
    Run,
    Runtime,
    Use,
    WarmUp,
    Work,
    envs_per_rank,
)
from lockstep.benchmark.splitting import Split, split_times
from lockstep.benchmark.spread import spread_of, use_of
from lockstep.core.environment import git_of_lockstep
from lockstep.core.gpu_mask import find_gpus
from lockstep.learn.config import TrainConfig
from lockstep.recipes.catalog import engines_of


@dataclass(frozen=True)
class Job:
    """What a benchmark was about, beside what was measured."""

    kind: Kind
    config: TrainConfig
    command: tuple[str, ...]
    work: Work | None = None
    learning: Learning | None = None


def assemble(job: Job, reports: Sequence[ProcessReport]) -> Bundle:
    """Return the bundle of a benchmark that has iterations.

    Args:
        job: what it was about.
        reports: of all processes, in their order.
    """
    num_ranks = sum(len(report.ranks) for report in reports)
    split, note = split_times(job.kind, reports, num_ranks)
    iteration_s = _iteration_s(job.kind, reports)
    nodes = number_nodes(reports)
    ranks = tuple(figure for report in reports for figure in _figures_of(report, reports, split, nodes, job))
    ranks = tuple(sorted(ranks, key=lambda each: each.rank))
    runtime = _runtime(reports, iteration_s, split, note)
    hardware = hardware_of(reports, nodes)
    findings: tuple[Finding, ...] = (_untold(note),)
    if split is not None:
        findings = find_reasons(
            ranks=ranks,
            split=split.means(),
            iteration_s=float(iteration_s.mean()),
            compute_s=_by_rank(split.compute_s, reports),
            exchanges=split.exchanges,
            hardware=hardware,
        )
    computed = [each.compute_s.mean for each in ranks if each.compute_s is not None]
    return Bundle(
        schema_version=SCHEMA_VERSION,
        kind=job.kind,
        run=run_of(job, reports[0].ranks[0].device),
        world_size=num_ranks,
        local_world_size=sum(nodes[report.process] == 0 for report in reports for _ in report.ranks),
        num_nodes=len(hardware),
        num_processes=len(reports),
        num_envs_per_rank=envs_per_rank(tuple(each.num_envs for each in ranks)),
        total_envs=sum(each.num_envs for each in ranks),
        workload_scope="global" if job.kind == "training" else "per_rank",
        measurement_scope="all_ranks",
        gpu_measurement_scope="own_device" if any(each.gpu_uuid for each in ranks) else "none",
        scope_values=SCOPE_VALUES,
        versions=installed(find_gpus()),
        hardware=hardware,
        runtime=runtime,
        startup=None,
        work=job.work,
        ranks=ranks,
        slowest_rank=_slowest(ranks),
        compute_spread=spread_of(computed) if len(computed) == num_ranks else None,
        resources=devices_of(ranks, reports, nodes),
        learning=job.learning,
        findings=findings,
    )


def _iteration_s(kind: Kind, reports: Sequence[ProcessReport]) -> np.ndarray:
    """Return ``(num_iterations,)``: how long each iteration took the job.

    Ranks that train are in step, so that each iteration counts with its slowest. Those of a runtime benchmark are not:
    there the slowest rank's iterations are the job's.
    """
    by_process = np.array([report.iteration_s for report in reports])
    if kind == "runtime":
        slowest: np.ndarray = by_process[int(by_process.sum(axis=1).argmax())]
        return slowest
    longest: np.ndarray = by_process.max(axis=0)
    return longest


def run_of(job: Job, device: str) -> Run:
    """Return which benchmark this was, on rank 0's device."""
    config = job.config
    return Run(
        benchmark_id=uuid.uuid4().hex,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=job.command,
        task=config.task,
        ml_framework=config.ml_framework,
        rl_library=config.rl_library,
        algorithm=config.algorithm,
        engine=_engine(config, device),
        device=device,
        dtype=config.dtype,
        seed=config.seed,
        config=config.model_dump(mode="json", serialize_as_any=True),
        git=git_of_lockstep(),
    )


_MIN_COUNTED_S = 0.2
"""The system counts what cores are busy with in hundredths of seconds: of a shorter time that says nothing."""


class Place(Protocol):
    """Where a process runs."""

    @property
    def process(self) -> int:
        """Its number."""

    @property
    def node(self) -> int | None:
        """As torchrun numbers nodes."""

    @property
    def hardware(self) -> NodeHardware:
        """Of its node."""


def _engine(config: TrainConfig, device: str) -> str:
    """Return the engine that a config comes to on a device."""
    if config.engine != "auto":
        return config.engine
    return engines_of(config.task, config.ml_framework, on_gpu=device.startswith("cuda"))[0]


def number_nodes(reports: Sequence[Place]) -> dict[int, int]:
    """Return the number of each process's node, from 0 on in the order of processes."""
    names = [(report.node, report.hardware.host) for report in reports]
    order = list(dict.fromkeys(names))
    return {report.process: order.index(name) for report, name in zip(reports, names, strict=True)}


def hardware_of(reports: Sequence[Place], nodes: dict[int, int]) -> tuple[NodeHardware, ...]:
    """Return every node, as its first process has described it."""
    first = {nodes[report.process]: report for report in reversed(reports)}
    return tuple(first[node].hardware.model_copy(update={"node": node}) for node in sorted(first))


def _runtime(reports: Sequence[ProcessReport], iteration_s: np.ndarray, split: Split | None, note: str) -> Runtime:
    first = reports[0]
    env_steps, wall_s = first.env_steps, max(report.wall_s for report in reports)
    compile_s = [report.compile_s for report in reports if report.compile_s is not None]
    return Runtime(
        warm_up=WarmUp(
            iterations=first.warm_up_iterations,
            env_steps=first.warm_up_steps,
            wall_s=max(report.warm_up_s for report in reports),
            compile_s=max(compile_s, default=None),
        ),
        iterations=len(iteration_s),
        env_steps=env_steps,
        wall_s=wall_s,
        steps_per_s=env_steps / wall_s,
        iteration_s=spread_of(iteration_s),
        each_iteration_s=tuple(iteration_s.tolist()),
        iteration_steps_per_s=spread_of(env_steps / len(iteration_s) / iteration_s),
        split=None if split is None else split.means(),
        split_note=note,
        exchanges=() if split is None else split.exchanges,
    )


def _by_rank(by_process: np.ndarray, reports: Sequence[ProcessReport]) -> np.ndarray:
    """Return ``(num_ranks, num_iterations)``: of each rank, what its process has."""
    rows = [(rank.rank, by_process[index]) for index, report in enumerate(reports) for rank in report.ranks]
    return np.array([row for _, row in sorted(rows, key=lambda pair: pair[0])])


def _figures_of(
    report: ProcessReport, reports: Sequence[ProcessReport], split: Split | None, nodes: dict[int, int], job: Job
) -> list[RankFigures]:
    index, num_iterations = report.process, len(report.iteration_s)
    steps = job.config.agent.num_steps_per_env * num_iterations
    phases = {name: use_of(seconds) for name, seconds in report.phases_s.items()}
    iteration_s = sum(report.iteration_s) / num_iterations
    shared: dict[str, Any] = {
        "process": report.process,
        "local_rank": report.local_rank,
        "node": nodes[report.process],
        "host": report.hardware.host,
        "cores": report.cores,
        "threads": report.threads,
        "wall_s": report.wall_s,
        "rollout_s": phases.get("rollout"),
        "update_s": phases.get("update"),
        "compute_s": None if split is None else use_of(split.compute_s[index]),
        "straggler_wait_s": None if split is None else use_of(split.straggler_wait_s[index]),
        "communication_s": None if split is None else use_of(split.communication_s[index]),
        "contention_s": None if split is None else use_of(split.contention_s[index : index + 1]),
        "cpu_s": _scaled(_cpu_percent(report.intervals), iteration_s / 100),
        "cpu_percent": _cpu_percent(report.intervals),
        "others_cpu_percent": _others_percent(report, reports, nodes),
        "memory_bytes": use_of([interval.memory_bytes for interval in report.intervals]),
    }
    return [_rank_figures(rank, report, shared, rank.num_envs * steps) for rank in report.ranks]


def _rank_figures(rank: OwnRank, report: ProcessReport, shared: dict[str, Any], env_steps: int) -> RankFigures:
    own_s = report.rank_s.get(rank.rank)
    if own_s is not None:
        shared = shared | {"wall_s": sum(own_s), "rollout_s": use_of(own_s), "compute_s": use_of(own_s)}
    gpus = [each.gpu_uuid for each in report.ranks if each.gpu_uuid is not None]
    place = gpus.index(rank.gpu_uuid) if rank.gpu_uuid is not None else None
    percent = memory = None
    if place is not None:
        seen = [each for each in report.intervals if place < len(each.gpu_percent)]
        percent = use_of([value for each in seen if (value := each.gpu_percent[place]) is not None])
        memory = use_of([value for each in seen if (value := each.gpu_memory_bytes[place]) is not None])
    return RankFigures(
        rank=rank.rank,
        device=rank.device,
        gpu_uuid=rank.gpu_uuid,
        pci_bus_id=rank.pci_bus_id,
        num_envs=rank.num_envs,
        env_steps=env_steps,
        gpu_percent=percent,
        gpu_memory_bytes=memory,
        **shared,
    )


def _cpu_percent(intervals: Sequence[Interval]) -> Use | None:
    return cpu_use([each.cpu_s for each in intervals], [each.seconds for each in intervals])


def cpu_use(busy_s: Sequence[float], seconds: Sequence[float]) -> Use | None:
    """Return the share of time, in percent of one core: over all intervals, and in the busiest; None of none.

    Args:
        busy_s: CPU seconds in each interval.
        seconds: that each of them lasted.
    """
    if not seconds:
        return None
    mean = sum(busy_s) / sum(seconds)
    peak = max(busy / length for busy, length in zip(busy_s, seconds, strict=True))
    return Use(mean=100 * mean, peak=100 * max(mean, peak))


def _scaled(use: Use | None, factor: float) -> Use | None:
    return None if use is None else Use(mean=use.mean * factor, peak=use.peak * factor)


def _others_percent(report: ProcessReport, reports: Sequence[ProcessReport], nodes: dict[int, int]) -> Use | None:
    """Return what was busy on a process's cores besides the job: what its node's processes there used is taken off."""
    if sum(each.seconds for each in report.intervals) < _MIN_COUNTED_S:
        return None
    own_cores = None if report.cores is None else set(report.cores)
    used = 0.0
    for other in reports:
        is_there = own_cores is None or other.cores is None or bool(own_cores & set(other.cores))
        if nodes[other.process] == nodes[report.process] and is_there:
            use = _cpu_percent(other.intervals)
            used += 0.0 if use is None else use.mean
    busy = cpu_use([each.busy_s for each in report.intervals], [each.seconds for each in report.intervals])
    most = 100.0 * (len(report.cores) if report.cores else report.hardware.num_cores)
    if busy is None:
        return None
    return Use(mean=min(most, max(0.0, busy.mean - used)), peak=min(most, max(0.0, busy.peak - used)))


def _slowest(ranks: Sequence[RankFigures]) -> int | None:
    """Return the rank that computes longest; None where that is not known."""
    known = [(each.compute_s.mean, -each.rank) for each in ranks if each.compute_s is not None]
    return -max(known)[1] if len(known) == len(ranks) else None


def _untold(note: str) -> Finding:
    """Return the finding that nothing can be said, and why."""
    return Finding(reason="unknown", rank=None, lost_share=0.0, words=f"Where the time goes can't be told: {note}.")


def devices_of(
    ranks: Sequence[RankFigures], reports: Sequence[ProcessReport], nodes: dict[int, int]
) -> tuple[DeviceUse, ...]:
    """Return what was used of each GPU that a rank computed on, and of the cores of each node."""
    found = []
    for key in dict.fromkeys((each.node, each.gpu_uuid) for each in ranks if each.gpu_uuid is not None):
        there = [each for each in ranks if (each.node, each.gpu_uuid) == key]
        found.append(
            DeviceUse(
                kind="gpu",
                node=key[0],
                uuid=key[1],
                pci_bus_id=there[0].pci_bus_id,
                ranks=tuple(each.rank for each in there),
                percent=there[0].gpu_percent,
                memory_bytes=_sum([each.gpu_memory_bytes for each in there]),
            )
        )
    for node in sorted(set(nodes.values())):
        own = [report for report in reports if nodes[report.process] == node]
        found.append(
            DeviceUse(
                kind="cpu",
                node=node,
                uuid=None,
                pci_bus_id=None,
                ranks=tuple(each.rank for each in ranks if each.node == node),
                percent=_scaled(_sum([_cpu_percent(each.intervals) for each in own]), 1 / _num_cores(own)),
                memory_bytes=_sum([use_of([part.memory_bytes for part in each.intervals]) for each in own]),
            )
        )
    return tuple(found)


def _num_cores(reports: Sequence[ProcessReport]) -> int:
    return reports[0].hardware.num_allowed_cores


def _sum(uses: Sequence[Use | None]) -> Use | None:
    known = [use for use in uses if use is not None]
    return Use(mean=sum(use.mean for use in known), peak=sum(use.peak for use in known)) if known else None
