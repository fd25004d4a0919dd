import numpy as np
import pytest

from lockstep.benchmark.forecast.compute import fit_compute
from lockstep.benchmark.forecast.model import fit_model, hold_back
from lockstep.benchmark.forecast.network import Network
from lockstep.benchmark.forecast.points import Point, read_points
from lockstep.benchmark.schema import Bundle, Use
from tests.unit.forecast_fixtures import World, grid, train


def point(bundle: Bundle) -> Point:
    return read_points([("held back", bundle)])[0]


def error(bundles: list[tuple[str, Bundle]], held_back: Bundle, given: Network | None = None) -> float:
    """Return by which share a model of some bundles is wrong about another."""
    measured = point(held_back)
    return fit_model(read_points(bundles), given).predict(measured.setting).iteration_s / measured.iteration_s - 1


def test_the_slowdown_by_busy_cores_is_found_from_one_and_two_ranks() -> None:
    world = World(slowdown=0.6)
    model = fit_model(read_points(grid(world)))
    assert model.compute.slowdown == pytest.approx(0.6, rel=0.01)
    # Of the three other cores of a node, two ranks keep one busy and four keep all.
    assert error(grid(world), train(world, 4, 1000, 30_000.0)) == pytest.approx(0.0, abs=0.01)


def test_other_numbers_of_envs_and_sizes_of_networks_are_foretold() -> None:
    for num_envs, flops in ((1000, 10_000.0), (8000, 10_000.0), (500, 40_000.0), (4000, 160_000.0)):
        assert error(grid(World()), train(World(), 1, num_envs, flops)) == pytest.approx(0.0, abs=0.01)


def test_ranks_that_take_turns_need_as_many_times_as_long() -> None:
    assert error(grid(World()), train(World(), 8, 1000, 30_000.0)) == pytest.approx(0.0, abs=0.01)
    prediction = fit_model(read_points(grid(World()))).predict(point(train(World(), 8)).setting)
    assert prediction.turns_s == pytest.approx(prediction.compute_s)


def test_what_turns_cost_beyond_that_is_learned_from_two_ranks_on_a_single_core() -> None:
    world = World(turns_overhead=0.25, slowdown=0.2, num_cores=2)
    four_on_two = train(world, 4, 1000, 30_000.0)
    assert error(grid(world), four_on_two) < -0.15
    crowded = [(f"crowded {num_envs}", train(world, 2, num_envs, num_cores=1)) for num_envs in (500, 2000)]
    assert error([*grid(world), *crowded], four_on_two) == pytest.approx(0.0, abs=0.01)
    model = fit_model(read_points([*grid(world), *crowded]))
    assert model.turns is not None
    assert model.turns.overhead == pytest.approx(0.25, abs=0.01)
    assert model.turns.exchange_s == 0.0
    assert model.compute.slowdown == pytest.approx(0.2, abs=0.01)


def test_turns_that_cost_something_at_each_exchange_are_told_from_those_that_slow_everything_down() -> None:
    world = World(turns_overhead=0.1, turns_exchange_s=0.002, num_cores=2)
    crowded = [
        (f"crowded {num_envs} {flops}", train(world, 2, num_envs, flops, num_cores=1))
        for num_envs in (500, 2000)
        for flops in (10_000.0, 80_000.0)
    ]
    model = fit_model(read_points([*grid(world), *crowded]))
    assert model.turns is not None
    assert model.turns.overhead == pytest.approx(0.1, abs=0.01)
    assert model.turns.exchange_s == pytest.approx(0.002, rel=0.03)
    assert error([*grid(world), *crowded], train(world, 4, 1000, 30_000.0)) == pytest.approx(0.0, abs=0.01)


def test_two_ranks_foretell_the_exchanges_of_eight() -> None:
    world = World(num_cores=8, latency_s=2e-4, byte_s=1e-7)
    assert error(grid(world), train(world, 8, 1000, 30_000.0)) == pytest.approx(0.0, abs=0.01)


def test_gpus_take_nothing_from_one_another() -> None:
    points = read_points(grid(World(num_cores=2), device="cuda"))
    model = fit_model(points)
    prediction = model.predict(point(train(World(num_cores=2), 8, device="cuda")).setting)
    assert (prediction.shared_memory_s, prediction.turns_s) == (0.0, 0.0)


def test_the_network_between_nodes_comes_from_its_user_or_from_bundles_of_several_nodes() -> None:
    inside, between = World(latency_s=1e-5, byte_s=1e-9), World(latency_s=2e-4, byte_s=5e-8)
    bundles = grid(inside)
    two_nodes = [(f"{flops}", train(between, 4, 1000, flops, num_nodes=2)) for flops in (1e4, 1e5)]
    held_back = train(between, 16, 1000, 50_000.0, num_nodes=2)
    assert error([*bundles, *two_nodes], held_back) == pytest.approx(0.0, abs=0.01)
    assert error(bundles, held_back, Network(2e-4 - 1e-5, 5e-8)) == pytest.approx(0.0, abs=0.01)
    assert error(bundles, held_back) < -0.1


def test_terms_that_never_differ_are_said_not_to_be_told_apart() -> None:
    same_size = read_points([(str(count), train(World(), count)) for count in (1, 2, 4)])
    found = fit_compute(same_size)
    assert [price.term.name for price in found.prices] == ["env steps (rollout)", "activations (update)"]
    assert dict(found.left_out)["calls per step (rollout)"] == "can't be told from env steps (rollout)"
    assert dict(found.left_out)["calls per minibatch (update)"] == "can't be told from activations (update)"


def test_a_term_that_explains_nothing_is_not_used() -> None:
    without_calls = World(call_s=0.0)
    found = fit_compute(read_points(grid(without_calls)))
    prices = {price.term.name: price.seconds for price in found.prices}
    assert prices["env steps (rollout)"] == pytest.approx(1e-6, rel=1e-3)
    assert "calls per step (rollout)" not in prices
    assert "calls per step (rollout)" in dict(found.left_out)


def test_the_price_of_each_term_is_found_again() -> None:
    found = fit_compute(read_points(grid(World())))
    prices = {price.term.name: price.seconds for price in found.prices}
    assert prices["calls per step (rollout)"] == pytest.approx(5e-4, rel=0.01)
    assert prices["calls per minibatch (update)"] == pytest.approx(1e-3, rel=0.05)
    assert prices["products of the networks (update)"] == pytest.approx(1e-11, rel=0.05)


def test_of_points_that_fit_the_model_each_is_foretold_from_the_others() -> None:
    world = World(slowdown=0.3, num_cores=2)
    more = [(f"{num_ranks} more", train(world, num_ranks, 1000, 30_000.0)) for num_ranks in (1, 2)]
    held_back = hold_back(read_points([*grid(world), *more]))
    assert len(held_back) == 10
    assert max(abs(each.error) for each in held_back) < 0.02


def test_points_that_no_model_fits_are_told_by_their_error() -> None:
    factors = np.random.default_rng(0).uniform(0.5, 2.0, size=8)
    sizes = [(envs, flops) for envs in (500, 1000, 2000, 4000) for flops in (10_000.0, 80_000.0)]
    noisy = [
        (str(index), train(World(), 1, *size, factor=factor))
        for index, (size, factor) in enumerate(zip(sizes, factors, strict=True))
    ]
    errors = [abs(each.error) for each in hold_back(read_points(noisy))]
    assert max(errors) > 0.3


def test_the_error_of_a_held_back_point_is_that_of_a_model_without_it() -> None:
    odd = ("odd", train(World(), 1, 1000, 30_000.0, factor=3.0))
    held_back = {each.point.names[0]: each for each in hold_back(read_points([*grid(World()), odd]))}
    # A model of the others knows nothing of it: it says a third of what was measured.
    assert held_back["odd"].error == pytest.approx(1 / 3 - 1, abs=0.02)


def test_several_measurements_of_one_setting_count_as_their_median() -> None:
    three = [(str(factor), train(World(), 1, factor=factor)) for factor in (1.0, 9.0, 1.1)]
    (merged,) = read_points(three)
    assert merged.names == ("1.0", "9.0", "1.1")
    assert merged.iteration_s == point(three[2][1]).iteration_s
    assert merged.own_s == point(three[2][1]).own_s


def test_threads_of_a_rank_share_its_work() -> None:
    """One rank of 4, 2 and 1 threads: a fifth of its work stays with one of them."""
    bundles = []
    for threads in (1, 2, 4):
        for num_envs in (500, 2000):
            bundle = train(World(), 1, num_envs, factor=0.2 + 0.8 / threads)
            (rank,) = bundle.ranks
            bundles.append((f"{threads} {num_envs}", bundle.model_copy(update={"ranks": (_with(rank, threads),)})))
    found = fit_compute(read_points(bundles))
    assert found.serial_share == pytest.approx(0.2, abs=0.01)


def test_a_thread_that_lacks_a_core_and_that_nothing_waits_for_takes_nothing_from_the_work() -> None:
    """The rank was on its core all the time; 30 ms are those of another thread of its process."""
    (rank,) = (bundle := train(World(), 1)).ranks
    assert bundle.runtime is not None and bundle.runtime.split is not None and rank.compute_s is not None
    computed_s = rank.compute_s.mean
    split = bundle.runtime.split.model_copy(update={"contention_s": 0.03, "compute_s": computed_s - 0.03})
    delayed = rank.model_copy(update={"contention_s": Use(mean=0.03, peak=0.03)})
    runtime = bundle.runtime.model_copy(update={"split": split})
    assert point(bundle.model_copy(update={"ranks": (delayed,), "runtime": runtime})).own_s == computed_s


def test_a_core_that_is_taken_from_a_rank_while_it_waits_is_not_taken_from_its_work() -> None:
    """Of 300 ms that each of two ranks is without its core, 40 ms are in what it computes."""
    bundle = train(World(), 2)
    assert bundle.runtime is not None and bundle.runtime.split is not None
    own_s = bundle.runtime.split.compute_s
    taken = {"compute_s": Use(mean=own_s + 0.04, peak=1.0), "contention_s": Use(mean=0.3, peak=1.0)}
    split = bundle.runtime.split.model_copy(update={"contention_s": 0.3, "straggler_wait_s": 0.0})
    disturbed = bundle.model_copy(
        update={
            "ranks": tuple(each.model_copy(update=taken) for each in bundle.ranks),
            "runtime": bundle.runtime.model_copy(update={"split": split}),
        }
    )
    assert point(disturbed).own_s == pytest.approx(own_s)


def _with(rank: object, threads: int) -> object:
    return rank.model_copy(update={"threads": threads})  # type: ignore[attr-defined]


def test_where_computing_is_not_measured_it_is_what_exchanges_leave() -> None:
    bundles = []
    for name, bundle in grid(World(num_cores=2)):
        ranks = tuple(
            each.model_copy(update={"compute_s": None, "rollout_s": None, "update_s": None}) for each in bundle.ranks
        )
        bundles.append((name, bundle.model_copy(update={"ranks": ranks})))
    held_back = train(World(num_cores=2), 4, 1000, 30_000.0)
    assert error(bundles, held_back) == pytest.approx(0.0, abs=0.02)
