"""What a scaling sweep found out, typed, and as a file: how throughput grew with the ranks, and what was lost.

All rates are those of whole jobs. The efficiency of a job is its rate over that of the smallest job grown in proportion
to the ranks: 1 where nothing is lost. In weak scaling every rank has as many envs as in any other job; in strong
scaling the job has, and its rate over that of the smallest is the speedup.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from lockstep.benchmark.record_files import RecordFile
from lockstep.benchmark.schema import Count, Finding, NodeHardware, Positive, Record, Seconds, TimeSplit, Versions
from lockstep.core.errors import UsageError

SCALING_SCHEMA_VERSION = 1
"""Grows with every change that a reader of older results could misread."""


class Interval(Record):
    """A mean over rounds, and between which values the true one lies with the result's confidence."""

    mean: float
    low: float | None = Field(description="null: of one round, which has no spread")
    high: float | None


class Losses(Record):
    """What is missing of the ideal throughput, as shares of it; below 0: less is lost than in the smallest job.

    All but ``rest`` compare the mean iteration with that of the smallest job.
    """

    total: float = Field(description="1 less the efficiency")
    compute: float = Field(description="ranks compute longer")
    contention: float = Field(description="ranks lack cores")
    straggler_wait: float = Field(description="ranks wait for later ones")
    communication: float = Field(description="exchanges take long after the last rank has come")
    rest: float = Field(description="what no part of the iteration accounts for")


class CountResult(Record):
    """What was measured with one number of ranks."""

    num_gpus: Positive = Field(description="as --num_gpus: processes")
    world_size: Positive = Field(description="ranks")
    num_envs_per_rank: Positive | tuple[Count, ...] = Field(description="a list, by rank, when they differ")
    total_envs: Positive
    bundles: tuple[str, ...] = Field(min_length=1, description="names of the files beside this one, by round")
    steps_per_s: tuple[float, ...] = Field(description="env steps of all ranks per second, by round")
    mean_steps_per_s: float = Field(gt=0, description="of all rounds: their steps over their time")
    ideal_steps_per_s: float = Field(gt=0, description="that of the smallest job, in proportion to the ranks")
    efficiency: Interval = Field(description="of each round's job over the smallest of the same round, over the ideal")
    split: TimeSplit | None = Field(description="of a mean iteration, mean over rounds; null where it can't be told")
    cpu_s: Seconds | None = Field(description="CPU time of a rank in a mean iteration, mean over ranks and rounds")
    losses: Losses | None = Field(description="null for the smallest job, and where there is no split")
    findings: tuple[Finding, ...] = Field(description="of the round with the median rate; the most expensive first")
    verdict: str = Field(description="one or two sentences for people")


class ScalingResult(Record):
    """The result of one sweep."""

    schema_version: Literal[1] = Field(description="of this description")
    kind: Literal["scaling"]
    mode: Literal["weak", "strong"] = Field(description="weak: as many envs on every rank; strong: in every job")
    date: str = Field(description="when it ended: ISO 8601, with the offset from UTC")
    command: tuple[str, ...]
    task: str
    ml_framework: Literal["torch", "jax"]
    rl_library: str
    algorithm: str
    engine: str
    device: str
    dtype: str
    confidence: float = Field(gt=0, lt=1, description="of the intervals: Student's t over rounds")
    order: tuple[tuple[Positive, ...], ...] = Field(description="num_gpus in the order they were run, by round")
    hardware: tuple[NodeHardware, ...]
    versions: Versions
    counts: tuple[CountResult, ...] = Field(min_length=2, description="by number of ranks, the smallest first")

    @model_validator(mode="after")
    def _is_whole(self) -> "ScalingResult":
        """Check what a reader relies on: counts grow, and each was measured in every round."""
        sizes = [each.world_size for each in self.counts]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"counts must grow from one to the next, and their world sizes are {sizes}")
        for each in self.counts:
            if not len(self.order) == len(each.bundles) == len(each.steps_per_s):
                raise ValueError(f"{len(self.order)} rounds must have as many bundles and rates of every count")
        return self


_FILE = RecordFile(ScalingResult, SCALING_SCHEMA_VERSION, "scaling result", "lockstep benchmark scaling")


def write_scaling(result: ScalingResult, path: Path) -> None:
    """Write a result as JSON, whole or not at all.

    Raises:
        RunError: the system refuses.
    """
    _FILE.write(result, path)


def read_scaling(path: Path) -> ScalingResult:
    """Return the result in a file.

    Raises:
        UsageError: it can't be read, is no result of a sweep, or is one of another version of the schema.
    """
    return parse_scaling(_FILE.read(path), str(path))


def parse_scaling(content: Any, name: str) -> ScalingResult:
    """Return a result from what JSON gave.

    Args:
        content: of the file.
        name: of the file, in messages.

    Raises:
        UsageError: it is no result of a sweep, or one of another version of the schema.
    """
    if not is_scaling(content) or "schema_version" not in content:
        raise UsageError(
            f"{name} is no result of a scaling sweep; give the scaling.json that lockstep benchmark scaling wrote"
        )
    return _FILE.parse(content, name)


def is_scaling(content: Any) -> bool:
    """Return whether what JSON gave means to be the result of a sweep, and not a bundle."""
    return isinstance(content, dict) and content.get("kind") == "scaling"
