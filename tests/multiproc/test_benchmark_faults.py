"""Real ranks with something wrong: the training benchmark says what, in figures and in words."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.benchmark.bundle import parse_bundle, read_bundle
from lockstep.benchmark.schema import Bundle, Finding
from lockstep.core.environment import allowed_cores
from tests.multiproc.commands import lockstep
from tests.rank_pool import RankPool

JOB = "tests.multiproc.jobs_faults:benchmark"
SMALL: dict[str, Any] = {
    "num_envs": 64, "dtype": "float32",
    "agent": {"num_steps_per_env": 8, "num_learning_epochs": 1, "num_mini_batches": 2, "actor_hidden_dims": [16],
              "critic_hidden_dims": [16]},
}  # fmt: skip


def measured(ranks: RankPool, settings: dict[str, Any], *arguments: Any) -> tuple[Bundle, list[dict[str, Any]]]:
    answers = ranks.run(JOB, settings, *arguments, timeout_s=120.0)
    return parse_bundle(json.loads(answers[0]["bundle"]), "test"), answers


def finding(bundle: Bundle, reason: str) -> Finding:
    (found,) = [each for each in bundle.findings if each.reason == reason]
    return found


def test_a_slow_env_is_a_straggler_and_the_others_wait_as_long_as_it_is_late(ranks_2: RankPool) -> None:
    delay_s, iterations = 0.06, 4
    bundle, (_, slept) = measured(ranks_2, SMALL, 2, iterations, ("slow env", delay_s))
    late_s = slept["slept_s"] / iterations
    first, second = bundle.ranks
    assert first.straggler_wait_s is not None and second.straggler_wait_s is not None
    assert first.straggler_wait_s.mean == pytest.approx(late_s, rel=0.1)
    assert second.straggler_wait_s.mean < 0.1 * late_s
    assert bundle.slowest_rank == 1
    # All of them together are as slow as the slowest.
    assert bundle.runtime is not None
    assert bundle.runtime.wall_s > late_s * iterations
    assert bundle.runtime.steps_per_s < 2 * 64 / delay_s
    words = finding(bundle, "straggler")
    assert words.rank == 1
    assert "Rank 1" in words.words and "straggler" in words.words
    assert {each.reason for each in bundle.findings}.isdisjoint({"slow_collective", "more_ranks_than_cores"})


def test_slow_exchanges_are_told_from_stragglers(ranks_2: RankPool) -> None:
    bundle, _ = measured(ranks_2, SMALL, 2, 4, ("slow exchanges", 0.05))
    assert bundle.findings[0].reason == "slow_collective"
    assert "xchange" in bundle.findings[0].words
    assert bundle.runtime is not None and bundle.runtime.split is not None
    split, num = bundle.runtime.split, sum(each.num for each in bundle.runtime.exchanges)
    assert split.communication_s + split.contention_s >= 0.05 * num
    assert split.communication_s > 5 * split.straggler_wait_s
    assert split.compute_s < 0.05  # of the four exchanges of an iteration none is taken for computing
    assert num >= 4
    own = [each for each in bundle.runtime.exchanges if each.tag != "others"]
    assert all(each.communication_s >= 0.05 and each.num_bytes > 0 for each in own)


def test_busy_loops_on_the_same_cores_are_told(ranks_2: RankPool) -> None:
    settings = SMALL | {"num_envs": 1024}
    bundle, _ = measured(ranks_2, settings, 2, 6, ("busy cores", 0.0))
    words = finding(bundle, "host_contention")
    assert words.lost_share > 0.3
    assert all(each.contention_s is not None and each.contention_s.mean > 0 for each in bundle.ranks)
    assert all(each.others_cpu_percent is not None and each.others_cpu_percent.mean > 30 for each in bundle.ranks)
    assert bundle.findings[0].reason == "host_contention"
    assert {each.reason for each in bundle.findings}.isdisjoint({"more_ranks_than_cores", "shared_memory_system"})


def test_more_ranks_than_cores_are_told(ranks_4: RankPool) -> None:
    settings = SMALL | {"num_envs": 1024}
    bundle, _ = measured(ranks_4, settings, 2, 4)
    if bundle.hardware[0].num_allowed_cores >= 4:
        pytest.skip("this machine has a core for each of four ranks")
    words = finding(bundle, "more_ranks_than_cores")
    assert f"{bundle.hardware[0].num_allowed_cores}" in words.words
    # What follows from it may cost more, and then says so.
    others = [each for each in bundle.findings if each.reason in ("slow_collective", "taking_turns")]
    assert all("see to the cores first" in each.words for each in others)
    assert {each.reason for each in bundle.findings}.isdisjoint({"host_contention", "shared_memory_system"})


def test_more_ranks_than_cores_are_told_of_a_job_that_was_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As batch work, which the group of a real job makes of its ranks, threads lack cores as any others do.
    monkeypatch.chdir(tmp_path)
    num_cores = allowed_cores()
    words = ("cartpole_classic", "--num_gpus", str(2 * num_cores), "--device", "cpu", "--num_envs", "512")
    done = lockstep("benchmark", "training_multigpu", *words, "--iterations", "8", "--output", "b.json")
    assert done.returncode == 0, done.stdout + done.stderr
    bundle = read_bundle(Path("b.json"))
    found = finding(bundle, "more_ranks_than_cores")
    assert found.lost_share > 0.1
    assert f"on {num_cores} allowed core" in found.words


@pytest.mark.parametrize("num_envs", [64, (64, 32), (64, 0)], ids=["even", "uneven", "a rank without envs"])
def test_throughput_is_all_ranks_work_over_the_time_of_the_slowest(ranks_2: RankPool, num_envs: Any) -> None:
    check_throughput(ranks_2, SMALL | {"num_envs": num_envs})


@pytest.mark.parametrize("num_envs", [16, (32, 16, 8, 64)], ids=["even", "uneven"])
def test_throughput_of_four_ranks(ranks_4: RankPool, num_envs: Any) -> None:
    check_throughput(ranks_4, SMALL | {"num_envs": num_envs})


def check_throughput(ranks: RankPool, settings: dict[str, Any]) -> None:
    bundle, counted = measured(ranks, settings, 2, 6)
    assert bundle.runtime is not None
    num_steps = sum(each["num_steps"] for each in counted)
    assert bundle.runtime.env_steps == num_steps == sum(each.env_steps for each in bundle.ranks)
    assert [each.env_steps for each in bundle.ranks] == [each["num_steps"] for each in counted]
    # Ranks meet once more before the clock of the benchmark starts, and compare their state before it is read last.
    within_s, around_s = (max(each[name] for each in counted) for name in ("within_s", "around_s"))
    assert within_s <= bundle.runtime.wall_s <= 1.05 * around_s + 0.1
    assert bundle.runtime.steps_per_s == pytest.approx(num_steps / bundle.runtime.wall_s)
    assert bundle.runtime.warm_up.iterations == 2
    assert (bundle.world_size, bundle.workload_scope) == (ranks.world_size, "global")
