"""Timing a stepper, and a training apart: what is measured, and when ranks wait for one another."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.benchmark.runtime.steps import RankRuntime, time_steps
from lockstep.benchmark.training.apart import measure_apart
from lockstep.session.framework import Learner


class Diary:
    """A communicator that notes when it is called, beside what else is noted."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def gather_text(self, text: str, tag: str) -> list[str]:
        self.entries.append("barrier")
        return [text]

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.entries.append("watch")
        yield
        self.entries.append("watched")


class TwoRanks:
    """A process with the ranks 2 and 3; the n-th block takes n seconds on rank 2 and half of that on rank 3."""

    env = None
    compile_s: float | None = None

    def __init__(self, diary: Diary) -> None:
        self.num_envs = {2: 8, 3: 0}
        self._diary, self._num_blocks = diary, 0

    def step(self, num_steps: int) -> dict[int, float]:
        self._diary.entries.append(f"step {num_steps}")
        self._num_blocks += 1
        self.compile_s = 0.25
        return {2: float(self._num_blocks), 3: self._num_blocks / 2}

    def states(self) -> dict[str, Any]:
        return {}


def test_every_rank_of_the_process_has_its_own_times_without_the_warm_up() -> None:
    diary: Any = Diary()
    measured = time_steps(TwoRanks(diary), diary, 16, warm_up=2, iterations=3, watching=diary.watching())
    assert measured.ranks == (
        RankRuntime(rank=2, num_envs=8, env_steps=384, iteration_s=(3.0, 4.0, 5.0)),
        RankRuntime(rank=3, num_envs=0, env_steps=0, iteration_s=(1.5, 2.0, 2.5)),
    )
    assert [rank.wall_s for rank in measured.ranks] == [12.0, 6.0]
    assert (measured.warm_up_iterations, measured.compile_s, measured.num_steps_per_env) == (2, 0.25, 16)


def test_ranks_wait_for_one_another_before_and_after_what_is_measured() -> None:
    diary: Any = Diary()
    time_steps(TwoRanks(diary), diary, 4, warm_up=1, iterations=2, watching=diary.watching())
    assert diary.entries == ["step 4", "barrier", "watch", "barrier", "step 4", "step 4", "watched", "barrier"]


def test_the_first_iteration_is_never_measured() -> None:
    diary: Any = Diary()
    measured = time_steps(TwoRanks(diary), diary, 4, warm_up=0, iterations=1)
    assert measured.warm_up_iterations == 1
    assert measured.ranks[0].iteration_s == (2.0,)


class Training:
    """Counts its iterations."""

    def __init__(self, diary: Diary) -> None:
        self.iteration, self._diary = 0, diary

    def iterate(self) -> dict[str, float]:
        self.iteration += 1
        self._diary.entries.append(f"iteration {self.iteration}")
        return {}


def test_a_training_apart_is_warmed_up_once_and_then_goes_on() -> None:
    diary: Any = Diary()
    training: Any = Training(diary)
    learner = Learner(training, engine=None)  # type: ignore[arg-type]
    first = measure_apart(learner, diary, 2, warm_up=3)
    again = measure_apart(learner, diary, 1, warm_up=3)
    assert (len(first), len(again)) == (2, 1)
    assert all(seconds >= 0 for seconds in (*first, *again))
    assert diary.entries == [
        *("iteration 1", "iteration 2", "iteration 3", "barrier", "iteration 4", "iteration 5", "barrier"),
        *("barrier", "iteration 6", "barrier"),
    ]
