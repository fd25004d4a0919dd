import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.benchmark.forecast.network import (
    Network,
    fit_network,
    messages_of,
    read_bandwidth,
    read_latency,
)
from lockstep.benchmark.forecast.points import read_points
from lockstep.core.errors import UsageError
from tests.unit.forecast_fixtures import World, train


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("100Gb/s", 12.5e9),
        ("100 Gbit/s", 12.5e9),
        ("100Gbps", 12.5e9),
        ("12.5GB/s", 12.5e9),
        (" 800 Mb/s ", 1e8),
        ("1TB/s", 1e12),
        (".5GB/s", 5e8),
        ("64000b/s", 8000.0),
    ],
)
def test_a_bandwidth_is_read_in_bits_or_bytes(text: str, bytes_per_s: float) -> None:
    assert 1 / read_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5us", 5e-6), ("5 µs", 5e-6), ("5μs", 5e-6), ("800ns", 8e-7), ("0.1ms", 1e-4), ("2.s", 2.0)],
)
def test_a_latency_is_read_in_its_unit(text: str, seconds: float) -> None:
    assert read_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "100", "100G", "100gb/s", "Gb/s", "-1Gb/s", "0Gb/s", "infGb/s", "nanGB/s", "1e3Gb/s", "1PB/s", "1.2.3GB/s",
     "5us", "١GB/s", "999999TB/s", "1b/s", "100Gb/s\nx"],
)  # fmt: skip
def test_a_bandwidth_that_makes_no_sense_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="bandwidth must be") as caught:
        read_bandwidth(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "5", "us", "5 m", "-5us", "0us", "nans", "1h", "5US", "11s", "0.1ns", "1e-6s"])
def test_a_latency_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="latency must be"):
        read_latency(text)


@given(st.text(max_size=30) | st.from_regex(r"[0-9.]{1,400} ?[kMGT]?(b|B|bit|bp)/?s", fullmatch=True))
def test_any_other_text_is_refused_or_is_a_speed_that_a_network_may_have(text: str) -> None:
    for read, least, most in ((read_bandwidth, 1e-14, 1e-3), (read_latency, 1e-9, 10.0)):
        try:
            value = read(text)
        except UsageError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert least * 0.999 <= value <= most * 1.001


@given(st.integers(min_value=1, max_value=999), st.sampled_from("MG"))
def test_a_byte_takes_eight_times_as_long_as_a_bit(number: int, prefix: str) -> None:
    assert read_bandwidth(f"{number}{prefix}bit/s") == pytest.approx(8 * read_bandwidth(f"{number}{prefix}B/s"))


def test_a_ring_of_four_ranks_has_six_steps_and_sends_each_byte_one_and_a_half_times() -> None:
    network = Network(latency_s=0.001, byte_s=1e-6)
    assert network.all_reduce_s(4, 8000, has_trees=False) == pytest.approx((0.006, 0.012))
    assert network.all_reduce_s(1, 8000, has_trees=False) == (0.0, 0.0)


def test_a_tree_is_taken_where_it_is_there_and_quicker() -> None:
    slow_steps, slow_bytes = Network(latency_s=0.001, byte_s=1e-9), Network(latency_s=1e-6, byte_s=1e-6)
    # 128 ranks: up 7 levels and down again, against 254 steps.
    assert slow_steps.all_reduce_s(128, 8000, has_trees=True) == pytest.approx((0.014, 1.6e-5))
    assert slow_steps.all_reduce_s(128, 8000, has_trees=False)[0] == pytest.approx(0.254)
    # 8 ranks: each byte goes through a link 1.75 times around the ring, and twice in trees.
    assert slow_bytes.all_reduce_s(8, 8_000_000, has_trees=True) == pytest.approx((1.4e-5, 14.0))


def test_what_gpus_took_is_told_apart_by_the_way_that_they_took() -> None:
    """Of 8 GPUs on 2 nodes small messages go through trees of 6 steps, large ones around a ring of 14."""
    bundles = []
    for name, num_bytes, seconds in (("small", 100.0, 6 * 1e-4), ("large", 1e8, 14 * 1e-4 + 1.75 * 0.1)):
        bundle = train(World(), 8, device="cuda", num_nodes=2, flops=10_000.0 + num_bytes)
        assert bundle.runtime is not None
        exchange = bundle.runtime.exchanges[0].model_copy(update={"num_bytes": num_bytes, "communication_s": seconds})
        runtime = bundle.runtime.model_copy(update={"exchanges": (exchange,)})
        bundles.append((name, bundle.model_copy(update={"runtime": runtime})))
    found = fit_network(read_points(bundles))
    assert found is not None
    assert (found.latency_s, found.byte_s) == pytest.approx((1e-4, 1e-9), rel=1e-3)


def test_a_step_between_nodes_costs_the_software_and_the_way_and_is_as_slow_as_the_slowest_link() -> None:
    inside = Network(latency_s=2e-5, byte_s=1e-9)
    assert Network(5e-6, 1e-10).after(inside).latency_s == pytest.approx(2.5e-5)
    assert Network(5e-6, 1e-10).after(inside).byte_s == 1e-9
    assert Network(5e-6, 1e-8).after(inside).byte_s == 1e-8
    assert Network(5e-6, 1e-8).after(None) == Network(5e-6, 1e-8)


def test_latency_and_bandwidth_are_found_again() -> None:
    world = World(latency_s=3e-5, byte_s=2e-9)
    bundles = [(str(count), train(world, count, flops=flops)) for count in (1, 2, 4) for flops in (1e4, 1e5)]
    found = fit_network(read_points(bundles))
    assert found is not None
    assert (found.latency_s, found.byte_s) == pytest.approx((3e-5, 2e-9), rel=1e-6)


def test_a_job_with_more_ranks_than_cores_tells_nothing_of_exchanges() -> None:
    crowded = [("a", train(World(), 8)), ("b", train(World(), 1))]
    assert fit_network(read_points(crowded)) is None


def test_exchanges_too_quick_to_be_seen_are_free() -> None:
    quick = train(World(latency_s=0.0, byte_s=0.0), 2)
    assert fit_network(read_points([("a", quick)])) == Network(0.0, 0.0)


def test_messages_of_all_parameters_grow_with_them_and_others_stay() -> None:
    points = read_points([("a", train(World(), 2, flops=10_000.0)), ("b", train(World(), 1, flops=90_000.0))])
    gradients, metrics = messages_of(points[1].setting, points)
    assert (gradients.tag, gradients.num, round(gradients.num_bytes)) == ("gradients", 10, 180_000)
    assert (metrics.tag, metrics.num, metrics.num_bytes) == ("metrics", 1, 100)


def test_without_any_seen_there_is_a_gradient_of_floats_for_each_minibatch() -> None:
    (point,) = read_points([("a", train(World(), 1, flops=10_000.0))])
    (message,) = messages_of(point.setting, [point])
    assert (message.num, message.num_bytes) == (10, 20_000)
