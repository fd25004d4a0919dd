"""What processes say of a training that never was."""

from collections.abc import Sequence

from lockstep.benchmark.process_report import OwnExchange, OwnRank, ProcessReport
from lockstep.benchmark.resources import Interval
from lockstep.benchmark.schema import NodeHardware


def interval(
    seconds: float = 1.0,
    cpu_s: float = 0.0,
    delay_s: float | None = 0.0,
    busy_s: float = 0.0,
    gloo_delay_s: float = 0.0,
) -> Interval:
    return Interval(
        seconds=seconds, cpu_s=cpu_s, delay_s=delay_s, gloo_delay_s=gloo_delay_s, busy_s=busy_s, memory_bytes=1000,
        gpu_percent=(), gpu_memory_bytes=(),
    )  # fmt: skip


def report(
    process: int,
    iteration_s: Sequence[float],
    waits_s: Sequence[Sequence[float]] = (),
    tags: Sequence[str] = (),
    *,
    node: int | None = 0,
    host: str = "here",
    ranks: Sequence[int] | None = None,
    num_envs: int = 4,
    alone_s: float | None = None,
    intervals: Sequence[Interval] = (),
    cores: tuple[int, ...] | None = None,
    env_steps: int = 100,
) -> ProcessReport:
    """Return the report of one process, which has the rank of its number unless ``ranks`` says otherwise."""
    hardware = NodeHardware(
        node=0, host=host, platform="Linux", cpu=None, num_cores=8, num_allowed_cores=8, memory_bytes=1, gpus=()
    )
    return ProcessReport(
        process=process,
        local_rank=process,
        node=node,
        hardware=hardware,
        ranks=tuple(
            OwnRank(rank=rank, device="cpu", gpu_uuid=None, pci_bus_id=None, num_envs=num_envs)
            for rank in (ranks or [process])
        ),
        cores=cores,
        threads=1,
        warm_up_iterations=1,
        warm_up_s=0.5,
        warm_up_steps=10,
        compile_s=None,
        wall_s=sum(iteration_s),
        env_steps=env_steps,
        iteration_s=tuple(iteration_s),
        phases_s={},
        exchanges=tuple(OwnExchange(tag=tag, num_bytes=8) for tag in tags),
        waits_s=tuple(tuple(row) for row in waits_s),
        alone_s=alone_s,
        intervals=tuple(intervals),
    )
