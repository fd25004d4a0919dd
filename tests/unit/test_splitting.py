"""Where an iteration's time goes, worked out by hand."""

import numpy as np
import pytest

from lockstep.benchmark.splitting import AT_THE_END, BY_EXCHANGES, BY_TIME_ALONE, ONE_RANK, Split, split_times
from tests.unit.report_fixtures import interval, report


def split_of(*reports: object, kind: str = "training", num_ranks: int | None = None) -> Split:
    split, _ = split_times(kind, reports, num_ranks or len(reports))  # type: ignore[arg-type]
    assert split is not None
    return split


def test_the_shortest_wait_is_communication_and_the_rest_is_for_stragglers() -> None:
    # In the first exchange rank 1 comes last, in the second rank 0.
    first = report(0, [1.0, 1.0], [[0.5, 0.1], [0.3, 0.1]], ["moments", "gradients"])
    second = report(1, [1.0, 1.0], [[0.1, 0.2], [0.1, 0.4]], ["moments", "gradients"])
    split = split_of(first, second)
    np.testing.assert_allclose(split.communication_s, [[0.2, 0.2]] * 2)
    np.testing.assert_allclose(split.straggler_wait_s, [[0.4, 0.2], [0.1, 0.3]])
    np.testing.assert_allclose(split.compute_s, [[0.4, 0.6], [0.7, 0.5]])
    means = split.means()
    assert means.compute_s == pytest.approx(0.55)
    assert means.straggler_wait_s == pytest.approx(0.25)
    assert means.communication_s == pytest.approx(0.2)
    assert means.contention_s == 0.0
    moments, gradients = split.exchanges
    assert (moments.tag, moments.num, moments.num_bytes) == ("moments", 1, 8)
    assert (moments.communication_s, moments.straggler_wait_s) == pytest.approx((0.1, 0.15))
    assert (gradients.communication_s, gradients.straggler_wait_s) == pytest.approx((0.1, 0.1))


def test_exchanges_of_one_kind_count_together() -> None:
    reports = [report(rank, [1.0], [[0.1, 0.3, 0.2]], ["gradients", "moments", "gradients"]) for rank in range(2)]
    gradients, moments = split_of(*reports).exchanges
    assert (gradients.tag, gradients.num) == ("gradients", 2)
    assert gradients.communication_s == pytest.approx(0.15)
    assert (moments.tag, moments.num) == ("moments", 1)
    assert moments.communication_s == pytest.approx(0.3)


def test_an_exchange_that_not_every_iteration_has() -> None:
    reports = [report(rank, [1.0, 1.0], [[0.1, 0.0], [0.1, 0.3]], ["gradients", "others"]) for rank in range(2)]
    split = split_of(*reports)
    gradients, others = split.exchanges
    assert (gradients.num, others.num) == (1, 0.5)
    assert (gradients.communication_s, others.communication_s) == pytest.approx((0.1, 0.3))
    np.testing.assert_allclose(split.communication_s, [[0.1, 0.4]] * 2)


def test_a_process_that_also_trained_alone() -> None:
    reports = [report(0, [1.0, 1.2], alone_s=0.4), report(1, [1.0, 1.2], alone_s=0.9)]
    split, note = split_times("training", reports, 2)
    assert split is not None and note == BY_TIME_ALONE
    np.testing.assert_allclose(split.compute_s, [[0.4], [0.9]])
    np.testing.assert_allclose(split.communication_s, [[0.2], [0.2]])  # 1.1 - 0.9
    np.testing.assert_allclose(split.straggler_wait_s, [[0.5], [0.0]])


def test_a_process_that_was_slower_alone_than_with_the_others_waits_for_nobody() -> None:
    split = split_of(report(0, [1.0], alone_s=1.3), report(1, [1.0], alone_s=0.8))
    np.testing.assert_allclose(split.compute_s, [[1.0], [0.8]])
    np.testing.assert_allclose(split.communication_s, [[0.0], [0.0]])
    np.testing.assert_allclose(split.straggler_wait_s, [[0.0], [0.2]])


def test_what_can_not_be_told() -> None:
    assert split_times("training", [report(0, [1.0], ranks=[0, 1])], 2)[0] is None
    # Exchanges that differ between ranks, or times alone of one process only, say nothing.
    differing = [report(0, [1.0], [[0.1]], ["moments"]), report(1, [1.0], [[0.1]], ["gradients"])]
    assert split_times("training", differing, 2)[0] is None
    assert split_times("training", [report(0, [1.0], alone_s=0.5), report(1, [1.0])], 2)[0] is None


def test_one_rank_computes_all_the_time() -> None:
    split, note = split_times("training", [report(0, [1.0, 3.0])], 1)
    assert split is not None and note == ONE_RANK
    assert split.means().compute_s == 2.0


def test_ranks_of_a_runtime_benchmark_wait_at_the_end() -> None:
    split, note = split_times("runtime", [report(0, [1.0, 2.0]), report(1, [3.0, 4.0])], 2)
    assert split is not None and note == AT_THE_END
    np.testing.assert_allclose(split.compute_s, [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_allclose(split.straggler_wait_s, [[2.0, 2.0], [0.0, 0.0]])
    means = split.means()
    assert (means.compute_s, means.straggler_wait_s, means.communication_s) == (2.5, 1.0, 0.0)


def test_the_note_of_exchanges() -> None:
    reports = [report(rank, [1.0], [[0.1]], ["moments"]) for rank in range(2)]
    assert split_times("training", reports, 2)[1] == BY_EXCHANGES


# --- cores that others had -----------------------------------------------------------------------------------------


def test_delays_of_one_thread_are_contention() -> None:
    # Two iterations of 1 s: in each 0.3 s on a core, 0.7 s ready without one.
    split = split_of(report(0, [1.0, 1.0], intervals=[interval(2.0, cpu_s=0.6, delay_s=1.4)]))
    assert split.means().contention_s == pytest.approx(0.7)
    assert split.means().compute_s == pytest.approx(0.3)


def test_delays_of_threads_at_the_same_time_count_once() -> None:
    split = split_of(report(0, [1.0], intervals=[interval(1.0, cpu_s=2.0, delay_s=2.0)]))
    assert split.means().contention_s == pytest.approx(0.5)
    assert split.means().compute_s == pytest.approx(0.5)


def test_a_process_that_sleeps_lacks_no_core() -> None:
    split = split_of(report(0, [1.0], intervals=[interval(1.0, cpu_s=0.1, delay_s=0.02)]))
    assert split.means().contention_s == pytest.approx(0.02)
    assert split.means().compute_s == pytest.approx(0.98)


def test_threads_that_queue_behind_their_own_process_lack_no_core() -> None:
    # On its one core, which it has nearly all the time, a second thread waits for the first.
    split = split_of(report(0, [1.0], intervals=[interval(1.0, cpu_s=0.97, delay_s=0.25)], cores=(3,)))
    assert split.means().contention_s == pytest.approx(0.03)


def test_threads_of_gloo_delay_nothing_but_exchanges() -> None:
    own = [interval(1.0, cpu_s=0.5, delay_s=0.0, gloo_delay_s=0.45)]
    split = split_of(*(report(rank, [1.0], [[0.2]], ["gradients"], intervals=own) for rank in range(2)))
    # Half of a second is left of which nobody knows; of that the exchange takes what it has.
    assert split.means().compute_s == pytest.approx(0.8)
    assert split.means().contention_s == pytest.approx(0.2)
    assert split.means().communication_s == pytest.approx(0.0)


def test_an_exchange_is_not_slow_because_a_rank_lacks_a_core() -> None:
    # 0.5 s of own work, all of it on a core; 0.5 s in an exchange, 0.4 s of it ready without a core.
    own = [interval(1.0, cpu_s=0.5, delay_s=0.4)]
    split = split_of(*(report(rank, [1.0], [[0.5]], ["gradients"], intervals=own) for rank in range(2)))
    means = split.means()
    assert means.compute_s == pytest.approx(0.5)
    assert means.contention_s == pytest.approx(0.4)
    assert means.communication_s == pytest.approx(0.1)
    assert split.exchanges[0].communication_s == pytest.approx(0.5)  # as it was


def test_a_delay_in_a_wait_for_a_straggler_makes_no_exchange_slow() -> None:
    # Rank 0 waits 0.6 s, 0.5 of them for rank 1, and lacks a core for 0.3 s of that; rank 1 lacks none.
    waiting = report(0, [1.0], [[0.6]], ["gradients"], intervals=[interval(1.0, cpu_s=0.4, delay_s=0.3)])
    late = report(1, [1.0], [[0.1]], ["gradients"], intervals=[interval(1.0, cpu_s=0.9, delay_s=0.0)])
    means = split_of(waiting, late).means()
    assert means.communication_s == pytest.approx(0.1)
    assert means.straggler_wait_s == pytest.approx(0.25)


def test_where_nobody_counts_delays_there_is_no_contention() -> None:
    split = split_of(report(0, [1.0], intervals=[interval(1.0, cpu_s=0.5, delay_s=None)]))
    assert split.means().contention_s == 0.0
