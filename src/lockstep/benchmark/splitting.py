"""Where an iteration's time goes: own work, waiting for stragglers, communication, and cores that others had.

In an exchange every rank stands until all have come and the message has travelled. Whoever comes last waits for the
message alone; so the shortest wait of all ranks is the communication, and what a rank waits longer than that it waits
for ranks that came later. No clocks of different hosts are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.benchmark.process_report import ProcessReport
from lockstep.benchmark.schema import Exchange, Kind, TimeSplit

BY_EXCHANGES = (
    "each exchange is timed on each rank: its shortest wait is communication, what a rank waits beyond that is for "
    "stragglers"
)
BY_TIME_ALONE = (
    "an iteration is one program, so each process also trained alone, all at the same time: that is its own work; the "
    "least of what the common iteration takes longer is communication, the rest is waiting for stragglers (per process)"
)
ONE_RANK = "one rank waits for nobody"
AT_THE_END = (
    "ranks wait for one another before the first iteration and after the last, not in between: what the slowest takes "
    "longer, the others wait at the end"
)
_DEVICES_OF_ONE = "the devices of one process wait for one another inside one program, which nobody sees from outside"
_UNKNOWN = "the learner does not tell its exchanges one by one"


@dataclass(frozen=True)
class Split:
    """Seconds by process and iteration; ``num_iterations`` is 1 where only means are known."""

    compute_s: np.ndarray  # (num_processes, num_iterations) float64, contention included that befell it
    straggler_wait_s: np.ndarray  # the same
    communication_s: np.ndarray  # the same, without what contention has added to it
    contention_s: np.ndarray  # (num_processes,) float64, of a mean iteration
    contention_in_compute_s: np.ndarray  # (num_processes,) of it, the part that is in compute_s
    exchanges: tuple[Exchange, ...]  # as they were, contention or not

    def means(self) -> TimeSplit:
        """Return the mean iteration."""
        return TimeSplit(
            compute_s=max(0.0, float(self.compute_s.mean() - self.contention_in_compute_s.mean())),
            contention_s=float(self.contention_s.mean()),
            straggler_wait_s=float(self.straggler_wait_s.mean()),
            communication_s=float(self.communication_s.mean()),
        )


def split_times(kind: Kind, reports: Sequence[ProcessReport], num_ranks: int) -> tuple[Split | None, str]:
    """Return where the time went, and how that was found or why it can't be.

    Args:
        kind: of the benchmark.
        reports: of all processes, in their order.
        num_ranks: of the job.
    """
    iteration_s = np.array([report.iteration_s for report in reports])
    nothing = np.zeros_like(iteration_s)
    if num_ranks == 1:
        return _with_contention(reports, iteration_s, nothing, nothing, ()), ONE_RANK
    if kind == "runtime":
        total_s = iteration_s.sum(axis=1, keepdims=True)
        waits_s = np.broadcast_to((total_s.max() - total_s) / iteration_s.shape[1], iteration_s.shape)
        return _with_contention(reports, iteration_s, waits_s, nothing, ()), AT_THE_END
    if len(reports) == 1:
        return None, _DEVICES_OF_ONE
    if all(report.exchanges for report in reports) and len({report.exchanges for report in reports}) == 1:
        return _by_exchanges(reports, iteration_s), BY_EXCHANGES
    alone_s = [report.alone_s for report in reports]
    if None not in alone_s:
        return _by_time_alone(reports, iteration_s, np.array(alone_s, dtype=np.float64)), BY_TIME_ALONE
    return None, _UNKNOWN


def _by_exchanges(reports: Sequence[ProcessReport], iteration_s: np.ndarray) -> Split:
    waits_s = np.array([report.waits_s for report in reports])  # (num_processes, num_iterations, num_exchanges)
    communication_s = waits_s.min(axis=0)
    straggler_s = waits_s - communication_s
    shared_s = np.broadcast_to(communication_s.sum(axis=1), iteration_s.shape)
    compute_s = np.maximum(0.0, iteration_s - waits_s.sum(axis=2))
    kinds = reports[0].exchanges
    tags = list(dict.fromkeys(kind.tag for kind in kinds))
    exchanges = []
    for tag in tags:
        own = [index for index, kind in enumerate(kinds) if kind.tag == tag]
        num = float((waits_s[:, :, own] > 0).any(axis=0).sum(axis=1).mean())  # some are not in every iteration
        exchanges.append(
            Exchange(
                tag=tag,
                num=num,
                num_bytes=float(np.mean([kinds[index].num_bytes for index in own])),
                communication_s=float(communication_s[:, own].sum(axis=1).mean()) / max(num, 1e-12),
                straggler_wait_s=float(straggler_s[:, :, own].sum(axis=2).mean()) / max(num, 1e-12),
            )
        )
    return _with_contention(reports, compute_s, straggler_s.sum(axis=2), shared_s, tuple(exchanges))


def _by_time_alone(reports: Sequence[ProcessReport], iteration_s: np.ndarray, alone_s: np.ndarray) -> Split:
    together_s = iteration_s.mean(axis=1)
    # Alone a process may be slower by chance than with the others; then all of it is its own.
    compute_s = np.minimum(alone_s, together_s)
    excess_s = together_s - compute_s
    communication_s = np.full_like(excess_s, excess_s.min())
    own, straggler, shared = (
        column[:, np.newaxis] for column in (compute_s, excess_s - communication_s, communication_s)
    )
    return _with_contention(reports, own, straggler, shared, ())


def _with_contention(
    reports: Sequence[ProcessReport],
    compute_s: np.ndarray,
    straggler_wait_s: np.ndarray,
    communication_s: np.ndarray,
    exchanges: tuple[Exchange, ...],
) -> Split:
    """Return the split with the delays for want of a core taken out of the times that they have made longer."""
    delays = [_delays_s(report, own) for report, own in zip(reports, compute_s.mean(axis=1), strict=True)]
    in_compute_s, elsewhere_s = (np.array(column) for column in zip(*delays, strict=True))
    # Who lacks a core comes late to what has arrived: an exchange is not slow for that. Of a delay in exchanges, those
    # that were waits for stragglers have their part; and as the shortest wait of all is communication, the delay of the
    # rank that had least of it is what can have made it longer.
    mean_s = float(communication_s.mean())
    shared_s, late_s = communication_s.mean(axis=1), straggler_wait_s.mean(axis=1)
    in_communication_s = elsewhere_s * shared_s / np.maximum(shared_s + late_s, 1e-12)
    moved_s = min(mean_s, float(in_communication_s.min()))
    kept = 1.0 - moved_s / mean_s if mean_s > 0 else 1.0
    return Split(compute_s, straggler_wait_s, communication_s * kept, in_compute_s + moved_s, in_compute_s, exchanges)


def _delays_s(report: ProcessReport, compute_s: float) -> tuple[float, float]:
    """Return for how long, of a mean iteration, a process had no core that could have run: in its own work, elsewhere.

    Threads that are ready at the same time wait at the same time: their delays count once.
    """
    delays_s = [interval.delay_s for interval in report.intervals]
    num_iterations, wall_s = len(report.iteration_s), sum(report.iteration_s)
    if not delays_s or None in delays_s or wall_s <= 0:
        return 0.0, 0.0
    per_iteration = wall_s / sum(interval.seconds for interval in report.intervals) / num_iterations
    delay_s = sum(delay for delay in delays_s if delay is not None) * per_iteration
    gloo_s = sum(interval.gloo_delay_s or 0.0 for interval in report.intervals) * per_iteration
    cpu_s = sum(interval.cpu_s for interval in report.intervals) * per_iteration
    own_s = wall_s / num_iterations
    num_ready = max(1.0, (cpu_s + delay_s) / own_s)
    # A thread that queues for a core while another of this process has it lacks none: what its threads ran on as many
    # cores as they could have had is no delay.
    num_cores = float(len(report.cores) if report.cores else report.hardware.num_allowed_cores)
    running_s = cpu_s / min(num_ready, num_cores)
    lacked_s = min((delay_s + gloo_s) / num_ready, max(0.0, own_s - running_s))
    in_compute_s = min(lacked_s, delay_s / num_ready, max(0.0, compute_s - running_s))
    return in_compute_s, lacked_s - in_compute_s
