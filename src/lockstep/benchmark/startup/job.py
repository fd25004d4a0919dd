"""The startup benchmark as a whole: every rank starts a process of its own again and again, and one bundle is made."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lockstep.benchmark.assemble import Job, cpu_use, hardware_of, number_nodes, run_of
from lockstep.benchmark.hardware import gpu_of, installed, own_cores, own_node
from lockstep.benchmark.joining import Finish, Prepare
from lockstep.benchmark.options import TAG
from lockstep.benchmark.schema import (
    SCHEMA_VERSION,
    SCOPE_VALUES,
    Bundle,
    NodeHardware,
    RankFigures,
    Record,
    envs_per_rank,
)
from lockstep.benchmark.spread import spread_of, use_of
from lockstep.benchmark.startup.starts import RankStarts, coordinator_config, measure_startup
from lockstep.core.gpu_mask import find_gpus
from lockstep.distributed.cores import threads_per_rank
from lockstep.distributed.topology import from_environment
from lockstep.session.train import check_start, checked_shares, join_team

if TYPE_CHECKING:
    from lockstep.benchmark.options import Options
    from lockstep.benchmark.schema import Startup
    from lockstep.learn.config import TrainConfig


class _Place(Record):
    """Where one process of the job runs."""

    process: int
    local_rank: int
    node: int | None
    hardware: NodeHardware
    cores: tuple[int, ...] | None
    threads: int
    gpus: dict[int, tuple[str, str]]
    """Of each rank that has one, UUID and PCI id."""


def benchmark_startup(config: TrainConfig, options: Options, prepare: Prepare, finish: Finish) -> None:
    """Start again and again, and hand the bundle to ``finish`` on rank 0. All processes of the job call it.

    Args:
        config: of the training that is started.
        options: of the benchmark.
        prepare: called on rank 0 before anything is started; raises what stands in the way of ``finish``.
        finish: writes and shows the bundle.

    Raises:
        UsageError: whatever can't work, found before anything is started.
        RunError: a start failed, or the disk refused.
    """
    framework = check_start(config)
    with ExitStack() as resources:
        resources.enter_context(framework.running())
        team = join_team(framework, coordinator_config(config), resources)
        team.comm.on_main(lambda: str(prepare() or ""), "output")
        startup, ranks = measure_startup(config, team.comm, repetitions=options.repetitions, say=_say)
        shares = checked_shares(config, len(ranks))
        texts = team.comm.gather_text(_own_place(team.comm.rank, ranks).model_dump_json(), TAG)
        places = [_Place.model_validate_json(text) for text in texts]
        job = Job("startup", config, options.command)
        bundle = _bundle(job, startup, ranks, shares, places)
        team.comm.on_main(lambda: finish(bundle) or "", "bundle")  # type: ignore[func-returns-value]


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - what rank 0 is doing, minutes may pass


def _own_place(process: int, ranks: tuple[RankStarts, ...]) -> _Place:
    topology, gpus = from_environment(), find_gpus()
    mask, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    found = {
        each.rank: gpu_of(str(each.place["device"]), gpus, mask, order) for each in ranks if each.process == process
    }
    return _Place(
        process=process,
        local_rank=topology.local_rank,
        node=topology.node,
        hardware=own_node(gpus),
        cores=own_cores(),
        threads=threads_per_rank(),
        gpus={rank: (gpu.uuid, gpu.pci_bus_id) for rank, gpu in found.items() if gpu is not None},
    )


def _bundle(
    job: Job, startup: Startup, ranks: tuple[RankStarts, ...], shares: tuple[int, ...], places: list[_Place]
) -> Bundle:
    nodes = number_nodes(places)
    hardware = hardware_of(places, nodes)
    figures = tuple(_figures(each, shares[each.rank], places[each.process], nodes[each.process]) for each in ranks)
    return Bundle(
        schema_version=SCHEMA_VERSION,
        kind="startup",
        run=run_of(job, figures[0].device),
        world_size=len(ranks),
        local_world_size=sum(each.node == 0 for each in figures),
        num_nodes=len(hardware),
        num_processes=len(places),
        num_envs_per_rank=envs_per_rank(shares),
        total_envs=sum(shares),
        workload_scope="per_rank",
        measurement_scope="all_ranks",
        gpu_measurement_scope="not_measured" if any(each.device.startswith("cuda") for each in figures) else "none",
        scope_values=SCOPE_VALUES,
        versions=installed(find_gpus()),
        hardware=hardware,
        runtime=None,
        startup=startup,
        work=None,
        ranks=figures,
        slowest_rank=startup.phases[-1].slowest_rank,
        compute_spread=spread_of([sum(each.total_s) / len(each.total_s) for each in ranks]),
        resources=(),
        learning=None,
        findings=(),
    )


def _figures(starts: RankStarts, num_envs: int, place: _Place, node: int) -> RankFigures:
    device = str(starts.place["device"])
    uuid, pci_bus_id = place.gpus.get(starts.rank, (None, None))
    return RankFigures(
        rank=starts.rank,
        process=starts.process,
        local_rank=place.local_rank,
        node=node,
        host=place.hardware.host,
        device=device,
        gpu_uuid=uuid,
        pci_bus_id=pci_bus_id,
        cores=place.cores,
        threads=place.threads,
        num_envs=num_envs,
        env_steps=0,
        wall_s=sum(starts.total_s),
        rollout_s=None,
        update_s=None,
        compute_s=use_of(starts.total_s),
        straggler_wait_s=None,
        communication_s=None,
        contention_s=None,
        cpu_s=use_of(starts.cpu_s),
        cpu_percent=cpu_use(starts.cpu_s, starts.total_s),
        others_cpu_percent=None,
        memory_bytes=use_of(starts.memory_bytes),
        gpu_percent=None,
        gpu_memory_bytes=None,
    )
