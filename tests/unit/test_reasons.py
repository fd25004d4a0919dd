"""Each reason why a job is not faster, told apart from the others by figures made by hand."""

import numpy as np
import pytest

from lockstep.benchmark.reasons.find import find_reasons
from lockstep.benchmark.schema import TimeSplit
from tests.unit.reason_fixtures import NUM_ITERATIONS, exchange, node, ranks_of, reasons_of, steady


def test_a_rank_whose_envs_sleep_is_a_straggler() -> None:
    # Rank 1 sleeps 50 ms in each rollout: it computes 150 ms with 100 ms of CPU time.
    (finding,) = reasons_of(
        steady(0.1, 0.15), rollout_s=[0.06, 0.11], update_s=[0.04, 0.04], cpu_s=[0.1, 0.1]
    )  # fmt: skip
    assert (finding.reason, finding.rank) == ("straggler", 1)
    assert finding.lost_share == pytest.approx(0.025 / 0.15, rel=1e-3)  # rank 0 waits 50 of 150 ms, rank 1 none
    for words in (
        "straggler",
        "node-0",
        "cpu",
        "50.2 ms of each iteration (33 %)",
        "50 ms of the difference in the rollout",
    ):
        assert words in finding.words
    assert "sleeps" in finding.words and "20 of 20 iterations" in finding.words


def test_a_rank_with_more_to_compute_is_told_from_one_that_sleeps() -> None:
    (finding,) = reasons_of(steady(0.1, 0.1, 0.1, 0.2))
    assert (finding.reason, finding.rank) == ("straggler", 3)
    assert "really computes more: 101 ms more CPU time" in finding.words
    assert "sleeps" not in finding.words


def test_another_kind_of_cores_is_named() -> None:
    (finding,) = reasons_of(steady(0.1, 0.2), hardware=[node(0), node(1, cpu="Intel Xeon Gold 5118")])
    assert "another kind (Intel Xeon Gold 5118; AMD EPYC 9654)" in finding.words


def test_waiting_ranks_that_spin_do_not_make_the_last_one_look_asleep() -> None:
    # Rank 1 computes for all of its 200 ms; rank 0 spins while it waits, so that both have the same CPU time.
    (finding,) = reasons_of(steady(0.1, 0.2), cpu_s=[0.2, 0.2])
    assert finding.reason == "straggler"
    assert "sleeps" not in finding.words


def test_a_straggler_that_is_starved_of_its_core_says_who_has_it() -> None:
    straggler, contention = reasons_of(
        steady(0.1, 0.2), contention_s=[0.0, 0.1], cpu_s=[0.1, 0.1], others_cpu_percent=[0.0, 97.0]
    )
    assert (straggler.reason, straggler.rank) == ("straggler", 1)
    assert "starved of its cores" in straggler.words and "97 % of a core" in straggler.words
    assert (contention.reason, contention.rank) == ("host_contention", 1)


def test_a_slow_gpu_is_no_matter_of_cores() -> None:
    hardware = [node(0, gpu="NVIDIA H200"), node(1, gpu="NVIDIA A100")]
    (finding,) = reasons_of(
        steady(0.1, 0.2),
        hardware=hardware,
        device=["cuda:0", "cuda:0"],
        gpu_uuid=["GPU-0", "GPU-1"],
        cpu_s=[0.02, 0.02],
    )
    assert (finding.reason, finding.rank) == ("straggler", 1)
    assert "GPU is of another kind (NVIDIA A100; NVIDIA H200)" in finding.words
    assert "sleeps" not in finding.words


def test_a_hot_gpu_of_the_same_kind() -> None:
    hardware = [node(0, gpu="NVIDIA H200"), node(1, gpu="NVIDIA H200")]
    gpus = ["GPU-0", "GPU-1"]
    (finding,) = reasons_of(
        steady(0.1, 0.2), hardware=hardware, device=["cuda:0"] * 2, gpu_uuid=gpus, gpu_percent=[60.0, 99.0]
    )
    assert "busy 99 % of the time (the other rank: 60 %)" in finding.words


def test_more_envs_are_no_straggler() -> None:
    (finding,) = reasons_of(steady(0.2, 0.1), num_envs=[128, 64])
    assert (finding.reason, finding.rank) == ("uneven_envs", 0)
    assert "straggler" not in finding.words
    assert "It has 128 envs, the other rank 64: share them out evenly (--total_envs 192)" in finding.words


def test_a_rank_far_later_than_its_envs_explain_is_a_straggler() -> None:
    (finding,) = reasons_of(steady(0.3, 0.1), num_envs=[80, 64])
    assert finding.reason == "straggler"
    assert "More envs account for 60.3 ms of the difference at most" in finding.words  # a fifth of 301.5 ms


def test_a_few_stragglers_are_named_together() -> None:
    (finding,) = reasons_of(steady(0.1, 0.2, 0.1, 0.19, 0.1, 0.1))
    assert (finding.reason, finding.rank) == ("straggler", None)
    assert finding.words.startswith("Ranks 1 and 3 (node-0) are stragglers")


def test_ranks_that_take_turns_have_no_straggler() -> None:
    compute_s = np.where((np.arange(NUM_ITERATIONS) % 4)[None, :] == np.arange(4)[:, None], 0.2, 0.1)
    (finding,) = reasons_of(compute_s)
    assert (finding.reason, finding.rank) == ("taking_turns", None)
    assert finding.lost_share == pytest.approx(0.375)  # three of four wait 100 of 200 ms
    assert "none is always the last" in finding.words


@pytest.mark.parametrize("num_ranks", [2, 8, 128])
def test_chance_makes_no_straggler(num_ranks: int) -> None:
    generator = np.random.default_rng(num_ranks)
    for _ in range(20):
        compute_s = 0.1 * (1 + 0.3 * generator.standard_normal((num_ranks, NUM_ITERATIONS))).clip(0.1)
        assert "straggler" not in [finding.reason for finding in reasons_of(compute_s)]


def test_one_rank_that_is_late_now_and_then_is_named_as_that() -> None:
    compute_s = steady(0.1, 0.1, 0.1, 0.1)
    compute_s[2, ::5] = 0.4
    (finding,) = reasons_of(compute_s)
    assert (finding.reason, finding.rank) == ("taking_turns", 2)
    assert "now and then" in finding.words


def test_ranks_that_lack_a_core_in_turn_are_sent_to_the_cores() -> None:
    compute_s = np.where((np.arange(NUM_ITERATIONS) % 2)[None, :] == np.arange(2)[:, None], 0.2, 0.1)
    contention, turns = reasons_of(compute_s, contention_s=[0.1, 0.1], others_cpu_percent=[90.0, 90.0])
    assert (contention.reason, turns.reason) == ("host_contention", "taking_turns")
    assert "see to the cores first" in turns.words


def test_ranks_that_are_late_in_different_phases() -> None:
    # Both compute 200 ms, but each waits for the other once: in the exchange after the rollout and after the update.
    compute_s = steady(0.2, 0.2)
    ranks = ranks_of(compute_s, rollout_s=[0.15, 0.05], update_s=[0.05, 0.15])
    split = TimeSplit(compute_s=0.2, contention_s=0.0, straggler_wait_s=0.1, communication_s=0.0)
    (finding,) = find_reasons(ranks, split, 0.3, compute_s, (), [node()])
    assert finding.reason == "taking_turns"
    assert "rank 0 is the last in the rollout (by 50 ms against the mean), rank 1 in the update" in finding.words


def test_a_slow_exchange_is_named_with_its_bandwidth() -> None:
    exchanges = [exchange("gradients", 20, 4e6, 0.004), exchange("statistics", 1, 1e3, 0.001)]
    (finding,) = reasons_of(steady(0.1, 0.1), 0.081, exchanges, [node(0), node(1)])
    assert finding.reason == "slow_collective"
    assert finding.lost_share == pytest.approx(0.081 / 0.1815, rel=1e-3)
    for words in ("'gradients'", "20 times", "4 ms each for 4 MB", "1 GB/s", "GLOO_SOCKET_IFNAME"):
        assert words in finding.words
    assert "latency" not in finding.words


def test_a_slow_exchange_of_small_messages_is_latency() -> None:
    (finding,) = reasons_of(steady(0.01, 0.01), 0.01, [exchange("gradients", 20, 1e3, 5e-4)])
    assert finding.reason == "slow_collective"
    assert "latency counts" in finding.words and "agent.num_mini_batches" in finding.words
    assert "SOCKET" not in finding.words  # there is one node


def test_a_straggler_and_a_slow_exchange_are_told_apart_and_the_dearer_comes_first() -> None:
    gradients = [exchange("gradients", 20, 4e6, 0.001)]
    assert [each.reason for each in reasons_of(steady(0.1, 0.2), 0.02, gradients)] == ["straggler", "slow_collective"]
    gradients = [exchange("gradients", 20, 4e6, 0.01)]
    assert [each.reason for each in reasons_of(steady(0.1, 0.2), 0.2, gradients)] == ["slow_collective", "straggler"]


def test_ranks_that_are_bound_to_the_same_core_are_more_than_it() -> None:
    (finding,) = reasons_of(steady(0.2, 0.2), contention_s=[0.1, 0.1], cores=[(3,), (3,)])
    assert finding.reason == "more_ranks_than_cores"
    assert "2 threads busy on 1 allowed core" in finding.words


def test_something_else_on_the_same_cores() -> None:
    (finding,) = reasons_of(steady(0.2, 0.2), contention_s=[0.1, 0.1], others_cpu_percent=[98.0, 97.0])
    assert (finding.reason, finding.rank) == ("host_contention", None)
    assert finding.lost_share == pytest.approx(0.1 / 0.201, rel=1e-3)
    for words in ("node 0 (node-0)", "ranks 0 and 1", "2 threads busy on 2 allowed cores", "195 % of a core"):
        assert words in finding.words


def test_a_quota_keeps_cores_away_without_any_other_process() -> None:
    (finding,) = reasons_of(steady(0.2, 0.2), contention_s=[0.1, 0.1], others_cpu_percent=[1.0, 2.0])
    assert finding.reason == "host_contention"
    assert "quota of the cgroup" in finding.words


def test_more_ranks_than_cores_are_their_own_fault() -> None:
    (finding,) = reasons_of(
        steady(*[0.2] * 4), hardware=[node(cores=2)], contention_s=[0.1] * 4, others_cpu_percent=[1.0] * 4
    )
    assert finding.reason == "more_ranks_than_cores"
    assert finding.lost_share == pytest.approx(0.1 / 0.201, rel=1e-3)
    for words in ("more ranks than cores", "ranks 0 to 3", "4 threads", "2 allowed cores", "(2 here)"):
        assert words in finding.words


@pytest.mark.parametrize(
    ("own", "others", "reason"), [(97.0, 1.0, "more_ranks_than_cores"), (50.0, 48.0, "host_contention")]
)
def test_threads_that_spin_beside_their_own_rank(own: float, others: float, reason: str) -> None:
    # As those of JAX do that wait on the one core of their rank.
    (finding,) = reasons_of(
        steady(0.2, 0.2),
        hardware=[node(cores=2)],
        contention_s=[0.1, 0.1],
        cpu_percent=[own, own],
        others_cpu_percent=[others, others],
    )
    assert finding.reason == reason
    assert ("by themselves ranks 0 and 1 keep every core busy" in finding.words) == (reason == "more_ranks_than_cores")


def test_only_the_node_that_lacks_cores_is_named() -> None:
    (finding,) = reasons_of(
        steady(*[0.2] * 4),
        hardware=[node(0), node(1)],
        contention_s=[0.0, 0.0, 0.1, 0.1],
        others_cpu_percent=[90.0] * 4,
    )
    assert finding.reason == "host_contention"
    assert "node 1 (node-1): ranks 2 and 3" in finding.words
    assert finding.lost_share == pytest.approx(0.05 / 0.201, rel=1e-3)


def test_ranks_on_gpus_may_be_more_than_cores() -> None:
    (finding,) = reasons_of(steady(0.2, 0.2), hardware=[node(cores=1)], device=["cuda:0"] * 2)
    assert finding.reason == "nothing_lost"
    (finding,) = reasons_of(steady(0.2, 0.2), hardware=[node(cores=1)], device=["cuda:0"] * 2, contention_s=[0.1, 0.1])
    assert finding.reason == "more_ranks_than_cores"


def test_a_rank_alone() -> None:
    (finding,) = reasons_of(steady(0.1))
    assert (finding.reason, finding.lost_share) == ("nothing_lost", 0.0)
    assert "100 % of the time" in finding.words
    (finding,) = reasons_of(steady(0.1), hardware=[node(cores=2)], threads=[4], contention_s=[0.04])
    assert (finding.reason, finding.rank) == ("more_ranks_than_cores", 0)
    assert "rank 0 keeps 4 threads busy" in finding.words and "--num_torch_threads" in finding.words


def test_one_straggler_among_128() -> None:
    compute_s = steady(*[0.1] * 77, 0.13, *[0.1] * 50)
    (finding,) = reasons_of(compute_s, hardware=[node(index) for index in range(16)])
    assert (finding.reason, finding.rank) == ("straggler", 77)
    assert "node-9" in finding.words
    assert finding.lost_share == pytest.approx(0.03 * 127 / 128 / 0.13, rel=1e-3)


def test_a_compiled_iteration_has_no_phases() -> None:
    (finding,) = reasons_of(steady(0.1, 0.15), is_compiled=True)
    assert (finding.reason, finding.rank) == ("straggler", 1)
    assert "rollout" not in finding.words
    assert "iterations" not in finding.words  # there is one mean of each rank


def test_a_little_of_everything_has_no_single_reason() -> None:
    (finding,) = reasons_of(steady(0.1, 0.107), 0.004, contention_s=[0.004, 0.004])
    assert finding.reason == "unknown"
    assert finding.lost_share == pytest.approx((0.0035 + 0.004 + 0.004) / 0.111, rel=0.01)


def test_waits_of_ranks_whose_work_was_not_measured() -> None:
    ranks = [each.model_copy(update={"compute_s": None}) for each in ranks_of(steady(0.1, 0.1))]
    split = TimeSplit(compute_s=0.1, contention_s=0.0, straggler_wait_s=0.1, communication_s=0.0)
    (finding,) = find_reasons(ranks, split, 0.2, np.empty((2, 0)), (), [node()])
    assert (finding.reason, finding.lost_share) == ("unknown", 0.5)
