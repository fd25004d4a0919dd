"""The numbers of an iteration over several ranks, worked out by hand."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.core.interrupts import StopReason
from lockstep.core.types import FlatGradients, Wait
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.torch import loop
from lockstep.learn.torch.ppo import RIDERS, UpdateResult
from lockstep.learn.torch.reporting import Agreement, OwnIteration, iteration_metrics
from lockstep.session.make_env import build_env
from tests.unit.learner_fixtures import Line, Meeting, make_training, on_every_rank, small_config, thread_comm, toy_env

Answer = tuple[dict[str, Any], Agreement]


def report(owns: list[OwnIteration], nonfinite: tuple[float, ...] | None = None) -> list[Answer]:
    """Return what each rank makes of what all have to say, one env each, after an update that is alike on all."""
    meeting = Meeting(len(owns))
    zero = torch.zeros((), dtype=torch.float64)
    flags = torch.tensor(nonfinite or (0.0,) * len(owns), dtype=torch.float64)
    result = UpdateResult(torch.zeros(len(RIDERS), dtype=torch.float64), zero, zero, flags)

    def work(rank: int) -> Answer:
        env = toy_env(Line(), 1, first_env_id=rank)
        return iteration_metrics(env, owns[rank], result, thread_comm(rank, meeting))

    return on_every_rank(meeting, work)


def test_the_slowest_rank_says_how_long_an_iteration_took() -> None:
    # Rollout, update and wait of three ranks: 4 s, 10 s and 5 s together. No rank is the slowest in all of them.
    owns = [
        OwnIteration(30, (1.0, 2.5, 0.5), None),
        OwnIteration(50, (2.0, 7.0, 1.0), None),
        OwnIteration(40, (3.0, 1.0, 1.0), None),
    ]
    first, *others = report(owns)
    assert others == [first] * 2
    metrics, agreed = first
    assert agreed == (None, False, [])
    assert metrics["num_steps"] == 120
    assert metrics["steps_per_s"] == 12.0  # 120 steps in 10 s
    times = {name: value for name, value in metrics.items() if name.startswith("time/")}
    assert times == {
        "time/rollout_mean": 2.0,
        "time/rollout_min": 1.0,
        "time/rollout_max": 3.0,
        "time/update_mean": 3.5,
        "time/update_min": 1.0,
        "time/update_max": 7.0,
        "time/wait_mean": pytest.approx(2.5 / 3),
        "time/wait_min": 0.5,
        "time/wait_max": 1.0,
    }


@pytest.mark.parametrize(
    ("reasons", "agreed"),
    [
        ((None, "preempted"), "preempted"),
        (("interrupted", None), "interrupted"),
        (("preempted", "interrupted"), "interrupted"),
        ((None, None), None),
    ],
)
def test_a_stop_of_one_rank_is_everyones(
    reasons: tuple[StopReason | None, StopReason | None], agreed: StopReason | None
) -> None:
    answers = report([OwnIteration(1, (1.0, 1.0, 1.0), reason) for reason in reasons])
    assert [answer.stop for _, answer in answers] == [agreed] * 2


@pytest.mark.parametrize(("due", "agreed"), [((True, False), True), ((False, True), False)])
def test_whether_a_checkpoint_is_due_rank_0_says(due: tuple[bool, bool], agreed: bool) -> None:
    answers = report([OwnIteration(1, (1.0, 1.0, 1.0), None, own) for own in due])
    assert [answer.save_due for _, answer in answers] == [agreed] * 2
    assert [answer.stop for _, answer in answers] == [None] * 2


def test_the_rank_with_a_tensor_that_is_not_finite_is_known_to_all() -> None:
    answers = report([OwnIteration(1, (1.0, 1.0, 1.0), None)] * 3, (0.0, 0.0, 1.0))
    assert [answer.bad_ranks for _, answer in answers] == [[2]] * 3


# --- waiting -------------------------------------------------------------------------------------------------------

GRADIENTS_S, ELSEWHERE_S = 2.0**-10, 1024.0


class Waiting(SoloComm):
    """Claims to have waited long wherever rows or states are exchanged, and a little for each minibatch."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def broadcast_(self, tensors: Mapping[str, torch.Tensor], tag: str) -> None:
        self.waited_s += ELSEWHERE_S

    def gather_rows(self, rows: torch.Tensor, tag: str) -> torch.Tensor:
        self.waited_s += ELSEWHERE_S
        return rows

    def mean_gradients_(self, gradients: FlatGradients, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.waited_s += GRADIENTS_S
        super().mean_gradients_(gradients, meanwhile)

    def take_waits(self) -> list[Wait]:
        taken, self.waited_s = self.waited_s, 0.0
        return [Wait("all", taken, 0)]


class Notes:
    """An observer that keeps what it is told."""

    stop_requested = None
    save_due = False

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.saved: list[int] = []

    def record(self, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        self.saved.append(iteration)

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        return None


def test_evaluations_and_checkpoints_are_no_part_of_an_iterations_waiting() -> None:
    config = small_config(max_iterations=4, evaluation={"interval": 2, "num_episodes": 2}, checkpoints={"interval": 3})
    comm, notes = Waiting(), Notes()
    training = make_training(config, comm=comm)  # broadcasts the initial state
    assert comm.waited_s >= ELSEWHERE_S
    evaluation_env = build_env(config, num_envs=2, streams="evaluation")
    assert loop.train(training, notes, evaluation_env) == "finished"
    assert ["eval/mean_return" in metrics for metrics in notes.metrics] == [False, True, False, True]
    assert notes.saved == [3, 4]
    # Two epochs of two minibatches, whatever came before the iteration.
    assert [metrics["time/wait_max"] for metrics in notes.metrics] == [4 * GRADIENTS_S] * 4
