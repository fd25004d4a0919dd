from typing import Any

import pytest

from lockstep.benchmark.forecast.forecast import Forecast, Request, forecast
from lockstep.benchmark.forecast.network import Network
from lockstep.benchmark.forecast.words import error_in_words, model_in_words, warnings_of, words_of
from lockstep.benchmark.schema import Bundle, Use
from lockstep.core.errors import UsageError
from tests.unit.bundle_fixtures import make_bundle
from tests.unit.forecast_fixtures import World, grid, train

FAST = Network(latency_s=1e-9, byte_s=1e-14)


def foretell(bundles: list[tuple[str, Bundle]], **request: Any) -> Forecast:
    return forecast(bundles, Request(**request))


def on_gpus(**prices: Any) -> list[tuple[str, Bundle]]:
    return grid(World(latency_s=0.0, byte_s=0.0, **prices), device="cuda")


# --- the table -----------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_each_power_of_two_and_for_the_largest_job() -> None:
    result = foretell(on_gpus(), num_nodes=3, ranks_per_node=4, network=FAST)
    rows = [(row.setting.num_ranks, row.setting.num_nodes, row.setting.ranks_per_node) for row in result.rows]
    assert rows == [(1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 2, 4), (12, 3, 4)]


def test_without_losses_each_rank_adds_as_much() -> None:
    result = foretell(on_gpus(), num_nodes=3, ranks_per_node=4, network=FAST)
    assert [row.efficiency for row in result.rows] == pytest.approx([1.0] * 5, abs=1e-3)
    assert [row.gain for row in result.rows][1:] == pytest.approx([1.0] * 4, abs=1e-3)
    assert result.rows[-1].steps_per_s == pytest.approx(12 * result.rows[0].steps_per_s, rel=1e-3)
    assert (result.stop, result.cause) == (None, None)
    assert words_of(result).startswith("Scaling goes on up to 12 ranks, with an efficiency of 100 % there.")


def test_a_rate_is_that_of_the_measured_training() -> None:
    bundles = on_gpus()
    first = bundles[0][1]
    assert first.runtime is not None
    result = foretell(bundles, ranks_per_node=1)
    # 500 envs of 10 steps each, in the iteration that was measured.
    assert result.rows[0].steps_per_s == pytest.approx(5000 / first.runtime.iteration_s.median, rel=0.01)


def test_the_first_bundle_says_what_is_foretold_and_num_envs_changes_it() -> None:
    bundles = grid(World())
    last_first = [*reversed(bundles)]
    assert foretell(bundles).rows[0].setting.num_envs == 500
    assert foretell(last_first).rows[0].setting.num_envs == 2000
    assert foretell(bundles, num_envs=1000).rows[0].setting.num_envs == 1000
    assert foretell(bundles).request.ranks_per_node == 2


# --- where scaling stops, and by what ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "cause", "words"),
    [
        (Network(1e-3, 1e-14), "latency", "Most is lost to the latency of exchanges between nodes (11 per iteration"),
        (Network(1e-9, 1e-6), "bandwidth", "Most is lost to the bandwidth between nodes (1 MB/s"),
    ],
)
def test_a_slow_network_stops_it(network: Network, cause: str, words: str) -> None:
    result = foretell(on_gpus(), num_nodes=64, ranks_per_node=2, network=network)
    assert result.stop is not None
    assert result.cause == cause
    assert words in words_of(result)


def test_more_ranks_than_cores_stop_it() -> None:
    result = foretell(grid(World(num_cores=2)), ranks_per_node=8)
    assert result.stop is not None and result.stop.setting.num_ranks == 4
    assert result.cause == "turns"
    words = words_of(result)
    assert "ranks that take turns on cores (4 threads on 2 cores of a node)" in words
    assert "Up to 2 ranks it pays" in words


def test_what_stops_inside_a_node_may_go_on_over_nodes() -> None:
    network = Network(1e-6, 1e-11)
    words = words_of(foretell(grid(World(num_cores=2)), num_nodes=8, ranks_per_node=4, network=network))
    assert "Up to 2 ranks it pays" in words
    assert "At that efficiency more ranks still give more" in words
    assert "by 32 ranks" in words


def test_memory_that_all_cores_share_stops_it() -> None:
    result = foretell(grid(World(slowdown=2.0, num_cores=4)), ranks_per_node=4)
    assert result.stop is not None and result.stop.setting.num_ranks == 4
    assert result.cause == "shared_memory"
    assert "what the ranks of a node share beside cores" in words_of(result)


def test_ranks_that_differ_by_chance_stop_it() -> None:
    result = foretell(on_gpus(straggler_s=0.02), num_nodes=4, ranks_per_node=8, network=FAST)
    assert result.cause == "straggler"
    assert "stragglers: ranks differ by chance" in words_of(result)


def test_a_rank_that_lags_is_named_and_carried_along() -> None:
    bundles = [*on_gpus(), ("slow", train(World(), 4, 500, slow={2: 2.5}, device="cuda"))]
    result = foretell(bundles, num_nodes=4, ranks_per_node=4, network=FAST)
    assert result.cause == "lagging"
    assert "a straggler: rank 2 on node-0 computes 150 % longer than the others" in words_of(result)
    two, four = result.rows[1].prediction, result.rows[2].prediction
    assert four.lagging_s == pytest.approx(1.5 * four.compute_s, rel=0.01)
    assert two.lagging_s == 0.0  # there is no rank 2


def test_hardly_any_gain_is_said_as_such() -> None:
    world = World(num_cores=2, slowdown=0.85, latency_s=0.0, byte_s=0.0)
    result = foretell(grid(world), ranks_per_node=2)
    assert result.stop is not None
    assert result.stop.efficiency > 0.5
    assert "Scaling stops at 2 ranks: the last doubling raises env steps per second by 8.1 % only" in words_of(result)


# --- how sure it is ------------------------------------------------------------------------------------------------


def test_the_error_is_said_with_the_worst_point() -> None:
    odd = ("odd", train(World(), 1, 1000, 30_000.0, factor=3.0))
    result = foretell([*grid(World()), odd])
    assert result.worst.point.names == ("odd",)
    assert "each of 9 measured settings foretold from all others" in error_in_words(result)
    assert "(1 rank on 4 cores, 1000 envs each, 15,000 parameters:" in error_in_words(result)
    assert any("wrong by 6" in each for each in warnings_of(result))


def test_what_was_never_measured_is_warned_of() -> None:
    result = foretell(on_gpus(), num_nodes=16, ranks_per_node=8, num_envs=16_000, network=FAST)
    warnings = "\n".join(warnings_of(result))
    assert "16000 envs per rank were never measured, only 500 to 2000" in warnings
    assert "128 ranks are far from the 2 that were measured at most" in warnings
    assert "8 ranks on a node were never measured, 2 at most" in warnings
    assert "the network between nodes was never measured" in warnings


def test_inside_what_was_measured_there_is_no_warning() -> None:
    result = foretell(grid(World(num_cores=2)), ranks_per_node=2, num_envs=1000)
    assert warnings_of(result) == []


def test_turns_that_were_never_measured_are_warned_of() -> None:
    result = foretell(grid(World(num_cores=2)), ranks_per_node=4)
    assert any("more ranks than cores were never measured" in each for each in warnings_of(result))
    crowded = ("crowded", train(World(num_cores=2), 2, num_cores=1))
    result = foretell([*grid(World(num_cores=2)), crowded], ranks_per_node=4)
    assert not any("more ranks than cores" in each for each in warnings_of(result))


def test_ranks_that_do_not_divide_into_the_cores_are_warned_of() -> None:
    crowded = ("crowded", train(World(num_cores=2), 2, num_cores=1))
    warnings = warnings_of(foretell([*grid(World(num_cores=2)), crowded], ranks_per_node=3))
    (warning,) = [each for each in warnings if "do not divide" in each]
    # Two turns on one of the cores, against one and a half on the mean.
    assert warning.startswith("3 threads do not divide into 2 cores evenly") and warning.endswith("33 % longer")


def test_bundles_of_one_rank_take_the_network_as_given_and_say_so() -> None:
    alone = [(name, bundle) for name, bundle in grid(World()) if bundle.world_size == 1]
    result = foretell(alone, ranks_per_node=2, network=Network(1e-3, 1e-9))
    # A gradient for each of 10 minibatches, of 2 steps.
    assert result.rows[1].prediction.latency_s == pytest.approx(0.02)
    assert any("exchanges inside a node can't be fitted" in each for each in warnings_of(result))


def test_bundles_that_something_disturbed_are_named() -> None:
    name, first = grid(World())[0]
    ranks = tuple(each.model_copy(update={"others_cpu_percent": Use(mean=120.0, peak=120.0)}) for each in first.ranks)
    bundles = [(name, first.model_copy(update={"ranks": ranks})), *grid(World())[1:]]
    (warning,) = [each for each in warnings_of(foretell(bundles)) if "other processes" in each]
    # 1.2 of the two cores that the rank may run on.
    assert "in 1 of 8 measured settings, in 1_500_10000.json 60 % of them" in warning


def test_the_model_is_told_with_its_prices() -> None:
    lines = "\n".join(model_in_words(foretell(grid(World(slowdown=0.5))).model))
    assert "env steps (rollout) 1 us" in lines
    assert "all other cores of the node busy: 50 % longer" in lines
    assert "exchanges inside a node: 10 us each step, 1 GB/s" in lines


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "runtime"}, "bundle odd is of lockstep benchmark runtime; a forecast is made from"),
        ({"num_envs": (256, 128)}, "bundle odd has num_envs (256, 128) by rank; a forecast needs as many on each"),
        ({"work": None}, "bundle odd does not say what an iteration consists of"),
        ({"run__task": "quadruped"}, "bundles of different trainings: task is cartpole_balance in 1_500_10000.json"),
        ({"run__ml_framework": "jax"}, "ml_framework is torch in 1_500_10000.json and jax in odd"),
        ({"run__algorithm": "sac"}, "algorithm is ppo in 1_500_10000.json and sac in odd"),
        ({"run__rl_library": "skrl"}, "rl_library is lockstep in 1_500_10000.json and skrl in odd"),
        ({"run__dtype": "float64"}, "dtype is float32 in 1_500_10000.json and float64 in odd"),
        ({"device": "cuda"}, "one was measured on GPUs and the other on CPU cores"),
        ({}, "bundles of different hardware: AMD EPYC 9654 96-Core Processor with 4 cores in 1_500_10000.json and"),
    ],
)
def test_bundles_that_can_not_be_taken_together_are_refused(changed: dict[str, Any], words: str) -> None:
    odd = make_bundle(**{"kind": "training", **changed})
    with pytest.raises(UsageError) as caught:
        foretell([*grid(World()), ("odd", odd)])
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_too_few_settings_are_refused_however_many_bundles_there_are() -> None:
    two = [("a", train(World(), 1)), ("b", train(World(), 1)), ("c", train(World(), 2)), ("d", train(World(), 2))]
    with pytest.raises(UsageError, match=r"needs bundles of 3 different settings at least .*, not 2"):
        foretell(two)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    bundle = train(World(), 2, device="cuda")
    shared = tuple(each.model_copy(update={"gpu_uuid": bundle.ranks[0].gpu_uuid}) for each in bundle.ranks)
    with pytest.raises(UsageError, match="bundle a has two ranks on one GPU"):
        foretell([("a", bundle.model_copy(update={"ranks": shared}))])


def test_an_unknown_network_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"no bundle was measured on several nodes, .* give --bandwidth and --latency"):
        foretell(on_gpus(), num_nodes=2)
    alone = [(name, bundle) for name, bundle in grid(World()) if bundle.world_size == 1]
    with pytest.raises(UsageError, match=r"every bundle is of one rank, .* or a bundle of 2 ranks"):
        foretell(alone, ranks_per_node=2)
    assert len(foretell(alone).rows) == 1
