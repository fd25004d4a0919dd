import pytest

from lockstep.benchmark.forecast.points import Lagging, find_lagging, read_points
from lockstep.benchmark.forecast.stragglers import Stragglers, expected_maximum, fit_stragglers
from tests.unit.forecast_fixtures import World, train


@pytest.mark.parametrize(("num_ranks", "value"), [(1, 0.0), (2, 0.56419), (3, 0.84628), (4, 1.02938), (10, 1.53875)])
def test_the_expected_maximum_is_that_of_the_tables(num_ranks: int, value: float) -> None:
    assert expected_maximum(num_ranks) == pytest.approx(value, abs=1e-5)


def test_more_ranks_wait_longer_but_never_much() -> None:
    maxima = [expected_maximum(2**power) for power in range(21)]
    assert maxima == sorted(maxima)
    assert maxima[-1] == pytest.approx(4.86, abs=0.02)  # of a million


def test_the_mean_wait_of_two_ranks_foretells_that_of_four() -> None:
    world = World(straggler_s=0.001)
    found = fit_stragglers(read_points([("a", train(world, 2)), ("b", train(world, 1))]))
    assert found.is_measured
    compute_s = read_points([("b", train(world, 1))])[0].own_s
    assert found.by_chance_s(2, compute_s) == pytest.approx(0.001)
    assert found.by_chance_s(4, compute_s) == pytest.approx(0.001 * 1.02938 / 0.56419, rel=1e-4)
    assert found.lagging is None


def test_a_rank_that_always_lags_is_named_and_not_taken_for_chance() -> None:
    slow = [(str(count), train(World(), count, slow={1: 1.3})) for count in (2, 4)]
    found = fit_stragglers(read_points(slow))
    assert found.lagging is not None
    assert (found.lagging.rank, found.lagging.host) == (1, "node-0")
    assert found.lagging.share == pytest.approx(0.3)
    assert found.deviation == pytest.approx(0.0, abs=1e-9)
    assert found.by_lagging_s(8, 2.0) == pytest.approx(0.6)
    assert found.by_lagging_s(1, 2.0) == 0.0


def test_a_rank_that_lagged_once_in_three_measurements_is_chance() -> None:
    bundles = [("a", train(World(), 4)), ("b", train(World(), 2)), ("c", train(World(), 2, 500, slow={0: 1.5}))]
    assert fit_stragglers(read_points(bundles)).lagging is None


def test_two_ranks_that_are_slow_together_are_no_single_one() -> None:
    hosts = ["a"] * 4
    assert find_lagging([1.0, 1.0, 1.3, 1.31], hosts) is None
    assert find_lagging([1.0], ["a"]) is None
    assert find_lagging([1.0, 1.05], ["a", "b"]) is None
    assert find_lagging([1.0, 1.25], ["a", "b"]) == Lagging(1, "b", 0.25)


def test_with_one_rank_alone_its_iterations_stand_for_the_ranks() -> None:
    found = fit_stragglers(read_points([("a", train(World(), 1))]))
    assert found == Stragglers(deviation=0.0, is_measured=False, lagging=None)
