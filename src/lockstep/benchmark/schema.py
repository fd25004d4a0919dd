"""What a result bundle holds: the one typed description, from which ``docs/benchmark-schema.md`` is generated.

A bundle is one JSON file about one benchmark, written by global rank 0 of what every rank has measured. Times are wall
times in seconds unless they say otherwise; a rate is always work over time, never a mean of rates.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1
"""Grows with every change that a reader of older bundles could misread."""

Kind = Literal["startup", "runtime", "training"]
WorkloadScope = Literal["global", "per_rank"]
MeasurementScope = Literal["all_ranks"]
GpuMeasurementScope = Literal["own_device", "not_measured", "none"]

SCOPE_VALUES: dict[str, dict[str, str]] = {
    "workload_scope": {
        "global": "the ranks share one workload, and its figures are of all of them together (training)",
        "per_rank": "every rank does the same work beside the others, and each one's figures are its own; rates are "
        "all ranks' work over the time of the slowest (startup, runtime)",
    },
    "measurement_scope": {"all_ranks": "every rank is measured, between two points that all ranks pass together"},
    "gpu_measurement_scope": {
        "own_device": "each rank measures the GPU that it computes on, found by UUID, with whatever else runs there",
        "not_measured": "ranks compute on GPUs, and what they use of them was not measured (startup)",
        "none": "no rank computes on a GPU that NVML tells about",
    },
}
"""For each field that names a scope, the values it may have and what they cover."""

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]


class Record(BaseModel):
    """Part of a bundle: immutable, without NaN or infinity; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Spread(Record):
    """How a quantity was spread over what it was measured for, in the unit of its name."""

    num: Positive = Field(description="values")
    mean: float
    median: float
    p10: float = Field(description="a tenth of the values lie below")
    p90: float = Field(description="nine tenths of the values lie below")
    least: float
    most: float
    std: float = Field(ge=0, description="standard deviation of the sample; 0 of one value")


class Use(Record):
    """What was used of something while the benchmark measured."""

    mean: float = Field(ge=0)
    peak: float = Field(ge=0)


class Run(Record):
    """Which benchmark this was."""

    benchmark_id: str = Field(description="of no other bundle")
    date: str = Field(description="when it ended: ISO 8601, with the offset from UTC")
    command: tuple[str, ...] = Field(description="words of the command line, the launcher's where there was one")
    task: str
    ml_framework: Literal["torch", "jax"]
    rl_library: str
    algorithm: str
    engine: str = Field(description="that stepped the physics")
    device: str = Field(description="where rank 0 computes")
    dtype: str
    seed: Count
    config: dict[str, Any] = Field(description="every setting of the training, as config.yaml has them")
    git: dict[str, Any] | None = Field(description="commit of lockstep and whether it was changed; null: no checkout")


class Versions(Record):
    """What was installed where rank 0 ran; null: not there."""

    python: str
    packages: dict[str, str | None] = Field(description="lockstep, torch, jax, mujoco, numpy, and the engine's own")
    driver: str | None = Field(description="of NVIDIA")
    cuda: str | None = Field(description="that torch or JAX computes with")
    nccl: str | None = Field(description="that torch has")


class GpuHardware(Record):
    """One GPU of a node."""

    name: str
    uuid: str = Field(description="by which NVML and CUDA mean the same one, whatever mask or order they count by")
    pci_bus_id: str
    memory_bytes: Count | None
    driver: str


class NodeHardware(Record):
    """One node of the job."""

    node: Count
    host: str
    platform: str
    cpu: str | None = Field(description="model")
    num_cores: Positive
    num_allowed_cores: Positive = Field(description="that the job may keep busy, by affinity and cgroup")
    memory_bytes: Positive
    gpus: tuple[GpuHardware, ...] = Field(description="in the order of the PCI bus")


class WarmUp(Record):
    """What came before the measured part and is in no other figure."""

    iterations: Count
    env_steps: Count = Field(description="of all ranks")
    wall_s: Seconds = Field(description="of the slowest rank, compiling included")
    compile_s: Seconds | None = Field(description="of it, where a framework compiles the whole iteration; else null")


class TimeSplit(Record):
    """Where the time of an iteration goes: seconds of a mean iteration, mean over ranks; all four add up to it."""

    compute_s: Seconds = Field(description="own work while a core or GPU was to be had, and whatever is nothing else")
    contention_s: Seconds = Field(description="ready to compute on a core, which something else had")
    straggler_wait_s: Seconds = Field(description="waiting in an exchange for ranks that came to it later")
    communication_s: Seconds = Field(description="in exchanges after the last rank had come: the shortest wait of all")


class Exchange(Record):
    """One kind of exchange between ranks, in a mean iteration."""

    tag: str = Field(description="what is exchanged")
    num: float = Field(ge=0, description="per iteration")
    num_bytes: float = Field(ge=0, description="of a rank's message, each time")
    communication_s: Seconds = Field(description="each time: the shortest wait of all ranks, mean over iterations")
    straggler_wait_s: Seconds = Field(description="each time, mean over ranks and iterations")


class Runtime(Record):
    """How fast it was."""

    warm_up: WarmUp
    iterations: Positive = Field(description="measured; of runtime: rounds of num_steps_per_env steps of every env")
    env_steps: Positive = Field(description="of all ranks, in the measured iterations")
    wall_s: float = Field(gt=0, description="of the slowest rank, in the measured iterations")
    steps_per_s: float = Field(gt=0, description="env_steps / wall_s")
    iteration_s: Spread = Field(description="over iterations; each iteration counts with its slowest rank")
    each_iteration_s: tuple[float, ...] = Field((), description="the same one by one, in their order")
    iteration_steps_per_s: Spread = Field(description="the same, as env steps of all ranks per second")
    split: TimeSplit | None = Field(description="null where it can't be told: see split_note")
    split_note: str | None = Field(description="how the split was found, or why there is none")
    exchanges: tuple[Exchange, ...] = Field(description="by tag; empty where they can't be seen one by one")


class StartupPhase(Record):
    """One phase of a start, on all ranks."""

    name: str
    cold_s: Spread | None = Field(description="over ranks, with empty kernel caches; null: not measured")
    warm_s: Spread | None = Field(description="over ranks and repetitions, with the caches of the cold start")
    slowest_rank: Count = Field(description="of the warm starts, or of the cold one where there is none")


class FunctionTime(Record):
    """What one function took of a phase, by a profiler that slows it down: compare shares, not seconds."""

    phase: str
    function: str = Field(description="module or file, line, name")
    calls: Count
    own_s: Seconds = Field(description="without what it called")
    total_s: Seconds = Field(description="with what it called")


class Startup(Record):
    """How long it took until the first iteration was done, all ranks starting at the same time."""

    repetitions: Count = Field(description="warm starts of every rank; there is one cold start before them")
    phases: tuple[StartupPhase, ...] = Field(description="in the order in which they come; 'total' last")
    functions: tuple[FunctionTime, ...] = Field(description="of rank 0, the most expensive of each phase first")


class RankFigures(Record):
    """One rank, or its process where its devices can't be told apart.

    Times are of a mean iteration and of the longest one (startup: of a start, and of the longest); those by sampling,
    of CPU and memory, of all measured iterations and of the half second in which it was most.
    """

    rank: Count
    process: Count
    local_rank: Count
    node: Count
    host: str
    device: str
    gpu_uuid: str | None
    pci_bus_id: str | None
    cores: tuple[int, ...] | None = Field(description="it may run on")
    threads: Positive | None = Field(description="it keeps busy at the same time, of the framework or the physics")
    num_envs: Count
    env_steps: Count
    wall_s: Seconds = Field(description="in all measured iterations")
    rollout_s: Use | None = Field(description="without waiting; null where an iteration is one compiled program")
    update_s: Use | None
    compute_s: Use | None = Field(description="all work of its own, contention included; null: not measured")
    straggler_wait_s: Use | None
    communication_s: Use | None
    contention_s: Use | None = Field(description="ready to compute without a core; known of all iterations together")
    cpu_s: Use | None = Field(description="CPU time of all its threads")
    cpu_percent: Use | None = Field(description="of one core: 200 is two cores")
    others_cpu_percent: Use | None = Field(description="of one core: what else was busy on the cores it may run on")
    memory_bytes: Use | None = Field(description="resident in main memory")
    gpu_percent: Use | None = Field(description="share of the time in which a kernel ran")
    gpu_memory_bytes: Use | None = Field(description="of this process where NVML tells, else of the whole GPU")


class DeviceUse(Record):
    """What was used of one GPU, by whatever ran there, or by the job of the cores of one node."""

    kind: Literal["gpu", "cpu"]
    node: Count
    uuid: str | None = Field(description="of a GPU")
    pci_bus_id: str | None
    ranks: tuple[int, ...] = Field(description="that computed there")
    percent: Use | None = Field(description="of the GPU's time; of a CPU, of all cores that the job may use")
    memory_bytes: Use | None = Field(description="of the ranks that computed there; the sum of their peaks is the peak")


class Work(Record):
    """What one iteration consists of; a forecast scales it."""

    num_steps_per_env: Positive
    num_learning_epochs: Count
    num_mini_batches: Count
    num_parameters: Count = Field(description="that are trained")
    flops_per_action: float = Field(ge=0, description="of the networks, forward, to act for one env step")
    flops_per_sample: float = Field(ge=0, description="of the networks, forward, for one sample of an update")


class Success(Record):
    """Whether the policy has learned what it should, asked by --check_success."""

    mean_return: float = Field(description="of an evaluation after the measured part")
    needed_return: float
    reached: bool


class Learning(Record):
    """How the learning went while it was measured (training only)."""

    env_steps: Count = Field(description="of all ranks, warm-up included")
    mean_return: float | None = Field(description="of the last iteration in which an episode ended")
    curve: tuple[tuple[int, float | None], ...] = Field(description="env steps and mean return of each iteration")
    metrics: dict[str, float | int | None] = Field(description="of the last iteration, as metrics.jsonl has them")
    success: Success | None = Field(description="null: not asked for")


class Finding(Record):
    """One reason why it is not faster, in words."""

    reason: Literal[
        "straggler",
        "uneven_envs",
        "taking_turns",
        "slow_collective",
        "host_contention",
        "more_ranks_than_cores",
        "shared_memory_system",
        "nothing_lost",
        "unknown",
    ]
    rank: Count | None = Field(description="that it is about; null: no single one")
    lost_share: Share = Field(description="of the mean iteration that it costs, mean over ranks")
    words: str = Field(description="one or two sentences for people")


class Artifacts(Record):
    """Files beside the bundle; null: not asked for."""

    video: str | None = None
    env_sensors: str | None = None


class Bundle(Record):
    """The result of one benchmark."""

    schema_version: Literal[1] = Field(description="of this description")
    kind: Kind = Field(description="what was measured")
    run: Run = Field(description="which benchmark this was")
    world_size: Positive = Field(description="ranks: processes with torch, devices of all processes with JAX")
    local_world_size: Positive = Field(description="ranks of rank 0's node")
    num_nodes: Positive = Field(description="hosts of the job, as torchrun numbers them")
    num_processes: Positive = Field(description="as many as ranks with torch; with JAX each may have several devices")
    num_envs_per_rank: Positive | tuple[Count, ...] = Field(description="a list, by rank, when they differ")
    total_envs: Positive = Field(description="of all ranks")
    workload_scope: WorkloadScope = Field(description="whose work the figures are about; see Scopes")
    measurement_scope: MeasurementScope = Field(description="who was measured")
    gpu_measurement_scope: GpuMeasurementScope = Field(description="what the figures of GPUs cover")
    scope_values: dict[str, dict[str, str]] = Field(description="what each value of a scope field covers")
    versions: Versions = Field(description="what was installed")
    hardware: tuple[NodeHardware, ...] = Field(description="of every node")
    runtime: Runtime | None = Field(description="null for startup")
    startup: Startup | None = Field(description="null for all else")
    work: Work | None = Field(description="null where no policy is trained, or the learner does not tell")
    ranks: tuple[RankFigures, ...] = Field(min_length=1, description="every rank, in order")
    slowest_rank: Count | None = Field(description="the one that computed longest; null where that can't be told")
    compute_spread: Spread | None = Field(description="over ranks, of compute_s of a mean iteration")
    resources: tuple[DeviceUse, ...] = Field(description="of each GPU, and of the cores of each node")
    learning: Learning | None = Field(description="null but for training")
    findings: tuple[Finding, ...] = Field(description="the most expensive first")
    artifacts: Artifacts = Field(Artifacts(), description="files beside it")

    @model_validator(mode="after")
    def _ranks_agree(self) -> "Bundle":
        """Check what a reader relies on: every rank is there, and totals are those of the ranks."""
        if [each.rank for each in self.ranks] != list(range(self.world_size)):
            raise ValueError(f"ranks must be 0 to {self.world_size - 1}, each once and in order")
        if sum(each.num_envs for each in self.ranks) != self.total_envs:
            raise ValueError("total_envs must be the sum of the ranks' num_envs")
        if [each.node for each in self.hardware] != list(range(self.num_nodes)):
            raise ValueError(f"hardware must name the nodes 0 to {self.num_nodes - 1}, each once and in order")
        if self.slowest_rank is not None and self.slowest_rank >= self.world_size:
            raise ValueError(f"slowest_rank {self.slowest_rank} is not among {self.world_size} ranks")
        if (self.kind == "startup") != (self.startup is not None) or (self.kind == "startup") == (
            self.runtime is not None
        ):
            raise ValueError("a bundle of kind startup has startup, any other has runtime")
        return self


def envs_per_rank(shares: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return ``num_envs_per_rank`` for so many envs on each rank."""
    return shares[0] if len(set(shares)) == 1 else shares
