"""A sweep with jobs made by hand: efficiency, intervals, where the rest went, and what happens when a job fails."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lockstep.benchmark.bundle import read_bundle, write_bundle
from lockstep.benchmark.scaling.picture import draw_scaling
from lockstep.benchmark.scaling.result import CountResult, ScalingResult, parse_scaling, read_scaling, write_scaling
from lockstep.benchmark.scaling.screen import render
from lockstep.benchmark.scaling.sweep import Sweep, interval_of, order_of, run_sweep
from lockstep.benchmark.schema import Bundle, Finding
from lockstep.core.errors import RunError, UsageError
from tests.unit.bundle_fixtures import make_bundle

Split = tuple[float, float, float, float]
"""Seconds of compute, contention, straggler wait and communication."""


def job(
    num_ranks: int, iteration_s: float, split: Split | None = None, envs: int = 64, cpu_s: float = 0.1, **changes: Any
) -> Bundle:
    """Return the bundle of a job in which ``num_ranks`` times ``envs`` envs take 24 steps in each of 20 iterations."""
    made = make_bundle("training", num_envs=[envs] * num_ranks)
    assert made.runtime is not None
    names = ("compute_s", "contention_s", "straggler_wait_s", "communication_s")
    wall_s = 20 * iteration_s
    runtime = made.runtime.model_dump() | {
        "wall_s": wall_s,
        "steps_per_s": made.runtime.env_steps / wall_s,
        "split": dict(zip(names, split or (iteration_s, 0.0, 0.0, 0.0), strict=True)),
    }
    ranks = [each.model_dump() | {"cpu_s": {"mean": cpu_s, "peak": cpu_s}, "threads": 1} for each in made.ranks]
    nothing = Finding(reason="nothing_lost", rank=None, lost_share=0, words="Nothing is lost.")
    content = made.model_dump() | {"runtime": runtime, "ranks": ranks, "findings": [nothing.model_dump()]} | changes
    return Bundle.model_validate(content)


class Machine:
    """Runs jobs whose bundles are given, by ``num_gpus``: one for each round."""

    def __init__(self, bundles: Mapping[int, list[Bundle | Exception]]) -> None:
        self.bundles = {count: list(each) for count, each in bundles.items()}
        self.ran: list[int] = []

    def run(self, num_gpus: int, path: Path) -> Bundle:
        self.ran.append(num_gpus)
        bundle = self.bundles[num_gpus].pop(0)
        if isinstance(bundle, Exception):
            raise bundle
        write_bundle(bundle, path)
        return bundle


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., ScalingResult]:
    """Return what runs a sweep over jobs made by hand, with its result and bundles in the test's folder."""

    def run(bundles: Mapping[int, list[Bundle | Exception]], is_strong: bool = False) -> ScalingResult:
        rounds = max(map(len, bundles.values()))
        return run_sweep(
            Sweep(tuple(bundles), rounds, is_strong),
            Machine(bundles).run,
            tmp_path,
            lambda line: None,
            lambda result: write_scaling(result, tmp_path / "scaling.json"),
        )

    return run


def last_of(result: ScalingResult) -> CountResult:
    return result.counts[-1]


def test_rounds_alternate() -> None:
    assert order_of(Sweep((1, 2, 4), 3, is_strong=False)) == ((1, 2, 4), (4, 2, 1), (1, 2, 4))


def test_jobs_run_in_that_order_and_say_so(tmp_path: Path) -> None:
    machine = Machine({1: [job(1, 0.1)] * 2, 2: [job(2, 0.1)] * 2})
    lines: list[str] = []
    run_sweep(Sweep((1, 2), 2, is_strong=False), machine.run, tmp_path, lines.append, lambda result: None)
    assert machine.ran == [1, 2, 2, 1]
    assert lines[1] == "round 1 of 2: --num_gpus 2"


def test_efficiency_pairs_the_jobs_of_a_round(sweep: Callable[..., ScalingResult]) -> None:
    # The machine is twice as slow in the second round, and all jobs are: the efficiencies are 0.8, 0.75 and 0.7.
    ones: list[Bundle | Exception] = [job(1, 0.1), job(1, 0.2), job(1, 0.1)]
    twos: list[Bundle | Exception] = [job(2, 0.1 / 0.8), job(2, 0.2 / 0.75), job(2, 0.1 / 0.7)]
    result = sweep({1: ones, 2: twos})
    # Student's t of 2 degrees of freedom: 4.302653; standard deviation 0.05 of three rounds.
    assert last_of(result).efficiency.mean == pytest.approx(0.75)
    assert last_of(result).efficiency.low == pytest.approx(0.75 - 4.302653 * 0.05 / 3**0.5, abs=1e-6)
    assert last_of(result).efficiency.high == pytest.approx(0.75 + 4.302653 * 0.05 / 3**0.5, abs=1e-6)
    assert last_of(result).steps_per_s[1] == pytest.approx(2 * 64 * 24 / (0.2 / 0.75))
    # All steps over all time, not a mean of rates: 3 x 1536 steps in 0.4 s of one rank, and twice that is the ideal.
    assert result.counts[0].mean_steps_per_s == pytest.approx(3 * 1536 / 0.4)
    assert last_of(result).ideal_steps_per_s == pytest.approx(2 * 3 * 1536 / 0.4)
    assert (result.counts[0].efficiency.low, result.counts[0].efficiency.high) == (1.0, 1.0)
    assert last_of(result).verdict.startswith("2 ranks reach 75.0 % (62.6 to 87.4 %) of 2 times the throughput of 1.")


def test_one_round_has_no_interval(sweep: Callable[..., ScalingResult]) -> None:
    result = sweep({1: [job(1, 0.1)], 4: [job(4, 0.125)]})
    efficiency = last_of(result).efficiency
    assert efficiency.mean == pytest.approx(0.8)
    assert (efficiency.low, efficiency.high) == (None, None)


def test_strong_scaling_is_speedup_over_ranks(sweep: Callable[..., ScalingResult]) -> None:
    # 256 envs in all: 2 ranks are 1.6 times as fast as one.
    result = sweep({1: [job(1, 0.16, envs=256)], 2: [job(2, 0.1, envs=128)]}, is_strong=True)
    assert result.mode == "strong"
    assert last_of(result).efficiency.mean == pytest.approx(0.8)


def test_what_is_missing_is_shared_out_over_the_parts_of_an_iteration(sweep: Callable[..., ScalingResult]) -> None:
    # 100 ms at 1 rank become 160 ms: 12 ms more computing, 28 ms without a core, 15 ms waiting, 5 ms exchanging.
    one = job(1, 0.1, (0.09, 0.01, 0.0, 0.0))
    two = job(2, 0.16, (0.102, 0.038, 0.015, 0.005))
    count = last_of(sweep({1: [one], 2: [two]}))
    losses = count.losses
    assert losses is not None
    assert losses.total == pytest.approx(0.06 / 0.16)
    assert losses.compute == pytest.approx(0.012 / 0.16)
    assert losses.contention == pytest.approx(0.028 / 0.16)
    assert losses.straggler_wait == pytest.approx(0.015 / 0.16)
    assert losses.communication == pytest.approx(0.005 / 0.16)
    assert losses.rest == pytest.approx(0, abs=1e-12)
    assert count.verdict.endswith(
        "Of the ideal, more time goes to ready ranks without a core (18 %), waiting for later ranks (9.4 %), computing "
        "(7.5 %), communication (3.1 %)."
    )


def test_strong_scaling_compares_with_a_part_of_the_work(sweep: Callable[..., ScalingResult]) -> None:
    # Half the envs should take half of 160 ms; they take 90 ms, and 10 ms go to exchanges.
    one, two = job(1, 0.16, envs=256), job(2, 0.1, (0.09, 0.0, 0.0, 0.01), envs=128)
    count = last_of(sweep({1: [one], 2: [two]}, is_strong=True))
    assert count.losses is not None
    assert count.losses.total == pytest.approx(0.2)
    assert count.losses.compute == pytest.approx(0.1)
    assert count.losses.communication == pytest.approx(0.1)
    (finding,) = count.findings
    assert finding.reason == "unknown"
    assert "does not shrink with its envs" in finding.words and "without --strong" in finding.words


def test_cpu_time_that_grows_beside_others_is_a_shared_memory_system(sweep: Callable[..., ScalingResult]) -> None:
    result = sweep({1: [job(1, 0.1, cpu_s=0.1)], 2: [job(2, 0.14, cpu_s=0.14)]})
    (finding,) = last_of(result).findings
    assert finding.reason == "shared_memory_system"
    assert finding.lost_share == pytest.approx(0.04 / 0.14)
    assert "40 ms longer per iteration (29 %)" in finding.words
    assert [each.reason for each in result.counts[0].findings] == ["nothing_lost"]


def test_computing_that_grows_without_cpu_time_is_none(sweep: Callable[..., ScalingResult]) -> None:
    (finding,) = last_of(sweep({1: [job(1, 0.1, cpu_s=0.1)], 2: [job(2, 0.14, cpu_s=0.1)]})).findings
    assert finding.reason == "unknown"


def test_ranks_without_cores_of_their_own_have_no_shared_memory_system(sweep: Callable[..., ScalingResult]) -> None:
    crowded = job(2, 0.14, cpu_s=0.14)
    hardware = [node.model_dump() | {"num_allowed_cores": 1} for node in crowded.hardware]
    crowded = job(2, 0.14, cpu_s=0.14, hardware=hardware)
    (finding,) = last_of(sweep({1: [job(1, 0.1, cpu_s=0.1)], 2: [crowded]})).findings
    assert finding.reason == "unknown"
    assert "more than there are cores" in finding.words


def test_the_reasons_of_the_bundle_stand_beside(sweep: Callable[..., ScalingResult]) -> None:
    straggler = Finding(reason="straggler", rank=1, lost_share=0.4, words="Rank 1 is a straggler.")
    two = job(2, 0.2, (0.12, 0.0, 0.08, 0.0), cpu_s=0.12, findings=[straggler.model_dump()])
    findings = last_of(sweep({1: [job(1, 0.1, cpu_s=0.1)], 2: [two]})).findings
    assert [each.reason for each in findings] == ["straggler", "shared_memory_system"]


def test_without_a_split_there_are_rates_alone(sweep: Callable[..., ScalingResult]) -> None:
    two = job(2, 0.2)
    assert two.runtime is not None
    two = job(2, 0.2, runtime=two.runtime.model_dump() | {"split": None})
    count = last_of(sweep({1: [job(1, 0.1)], 2: [two]}))
    assert (count.losses, count.split) == (None, None)
    assert count.verdict.endswith("Where the rest went can't be told.")


def test_jobs_with_other_envs_per_rank_do_not_compare(sweep: Callable[..., ScalingResult]) -> None:
    with pytest.raises(RunError, match=r"--num_gpus 2 ran num_envs_per_rank 32, --num_gpus 1 64"):
        sweep({1: [job(1, 0.1)], 2: [job(2, 0.1, envs=32)]})
    with pytest.raises(RunError, match=r"ran total_envs 128, --num_gpus 1 64; a sweep compares equal totals"):
        sweep({1: [job(1, 0.1)], 2: [job(2, 0.1)]}, is_strong=True)


def test_a_job_that_fails_leaves_what_came_before_it(sweep: Callable[..., ScalingResult], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no more memory; 1 bundle made before can be found in"):
        sweep({1: [job(1, 0.1)], 2: [RunError("no more memory")]})
    assert read_bundle(tmp_path / "gpus_1_round_1.json").world_size == 1
    assert not (tmp_path / "scaling.json").exists()


def test_a_job_that_fails_later_leaves_the_result_of_whole_rounds(
    sweep: Callable[..., ScalingResult], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"3 bundles made before and the result of 1 whole round"):
        sweep({1: [job(1, 0.1), UsageError("no such thing")], 2: [job(2, 0.125), job(2, 0.2)]})
    kept = read_scaling(tmp_path / "scaling.json")
    assert kept.order == ((1, 2),)
    assert last_of(kept).efficiency.mean == pytest.approx(0.8)


def test_a_result_is_read_as_it_was_written(sweep: Callable[..., ScalingResult], tmp_path: Path) -> None:
    result = sweep({1: [job(1, 0.1)] * 2, 2: [job(2, 0.125)] * 2})
    assert read_scaling(tmp_path / "scaling.json") == result


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, "schema_version 2, not the 1"),
        ({"schema_version": 0}, "older than the 1"),
        ({"schema_version": True}, "schema_version True, not the 1"),
        ({"kind": "training"}, "no result of a scaling sweep"),
        ({"mode": "sideways"}, "damaged: mode:"),
        ({"surprise": 1}, "damaged: surprise:"),
        ({"order": [[1, 2], [1, 2]]}, "2 rounds must have as many"),
    ],
)
def test_another_version_or_a_damaged_result_is_refused(
    change: dict[str, Any], words: str, sweep: Callable[..., ScalingResult]
) -> None:
    content = sweep({1: [job(1, 0.1)], 2: [job(2, 0.125)]}).model_dump(mode="json")
    with pytest.raises(UsageError, match=words):
        parse_scaling(content | change, "scaling.json")


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(UsageError, match="is no JSON"):
        read_scaling(tmp_path / "empty.json")
    with pytest.raises(UsageError, match="No such file"):
        read_scaling(tmp_path / "missing.json")


def test_equal_values_have_an_interval_of_no_width() -> None:
    found = interval_of([0.5, 0.5, 0.5], 0.95)
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_table_has_a_row_for_each_number_of_ranks(is_terminal: bool, sweep: Callable[..., ScalingResult]) -> None:
    one, two = job(1, 0.1), job(2, 0.16, (0.1, 0.04, 0.015, 0.005))
    console = Console(width=300, markup=False, highlight=False)
    with console.capture() as shown:
        console.print(render(sweep({1: [one] * 2, 2: [two] * 2}), is_terminal))
    lines = shown.get().splitlines()
    assert lines[0].startswith(
        "weak scaling of cartpole_balance: torch, lockstep ppo, 64 envs per rank, on cpu, 2 rounds"
    )
    row = "2 64 19.2 k 30.7 k 62.5 % 160 ms 62.5 % 25.0 % 9.4 % 3.1 %"
    assert row in [" ".join(line.split()) for line in lines]
    assert any(line.startswith("2 ranks reach 62.5 %") for line in lines)


def test_the_picture_is_drawn_for_any_number_of_rounds(sweep: Callable[..., ScalingResult], tmp_path: Path) -> None:
    path = tmp_path / "scaling.png"
    draw_scaling(sweep({1: [job(1, 0.1)], 2: [job(2, 0.125)]}), path)
    assert path.read_bytes().startswith(b"\x89PNG")
