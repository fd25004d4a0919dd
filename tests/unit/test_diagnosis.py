"""The non-finite guard: whatever is planted is named, and nothing is changed from the bad minibatch on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lockstep.core.errors import RunError
from lockstep.core.types import Array, FlatGradients, Namespace, Observations, State
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.torch import loop
from lockstep.learn.torch.reporting import Metrics
from lockstep.learn.torch.training import NonFiniteError, Training
from tests.unit.learner_fixtures import (
    Line,
    Meeting,
    differences,
    make_training,
    on_every_rank,
    round_trip,
    small_config,
    thread_comm,
    toy_env,
)


class Poisoned(Line):
    """Gives a bad value at one place of env 1, once ``place`` is set."""

    def __init__(self) -> None:
        super().__init__(spread=1.0)
        self.place = ""
        self.value = math.nan
        self.num_envs = 0  # the most that were ever seen

    def _spoil(self, xp: Namespace, place: str, array: Array) -> Array:
        self.num_envs = max(self.num_envs, array.shape[0])
        if place != self.place or array.shape[0] < self.num_envs:  # envs that begin anew have rows of their own
            return array
        which = xp.arange(array.shape[0]) == 1
        return xp.where(which if array.ndim == 1 else which[:, None], xp.full_like(array, self.value), array)

    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        groups = super().observations(xp, state, noise)
        return {name: self._spoil(xp, name, group) for name, group in groups.items()}

    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        terms = super().rewards(xp, state, action)
        return terms | {"progress": self._spoil(xp, "rewards", terms["progress"])}


def poisoned(place: str, value: float = math.nan, **agent: Any) -> Training:
    """A training of a few good iterations whose env then gives bad values."""
    task = Poisoned()
    training = make_training(small_config(agent=agent), toy_env(task, 8, max_episode_steps=5, dtype=torch.float32))
    for _ in range(2):
        training.iterate()
    task.place, task.value = place, value
    return training


def learned(training: Training) -> dict[str, Any]:
    """A copy of all that an iteration changes, the env aside."""
    return round_trip(training.learner.replicated_state())


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("rewards", math.nan, r"^rewards at index \(0, 1\) \(6 of 48 entries\)"),
        ("rewards", -math.inf, r"^rewards at index \(0, 1\) \(6 of 48 entries\)"),
        # What the first action was chosen at was seen before the env went bad, and a new episode begins well.
        ("actor", math.nan, r"^actor_observations at index \(1, 1, 0\) \(3 of 48 entries\)"),
        ("critic", math.inf, r"^critic_observations at index \(1, 1, 0\) \(16 of 192 entries\)"),
    ],
)
def test_what_the_env_gave_is_named(place: str, value: float, message: str) -> None:
    training = poisoned(place, value)
    before = learned(training)
    with pytest.raises(NonFiniteError, match=message):
        training.iterate()
    assert differences(before, learned(training)) == []


@pytest.mark.parametrize("name", ["log_std", "actor.perceptron.0.weight", "critic.perceptron.2.bias"])
def test_a_parameter_is_named(name: str) -> None:
    training = poisoned("")
    parameter = training.policy.get_parameter(name)
    parameter.data.view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError, match=rf"^parameter {name} at index \(0"):
        training.iterate()


def test_a_gradient_is_named() -> None:
    training = poisoned("")
    name = "critic.perceptron.0.weight"
    training.policy.get_parameter(name).register_hook(lambda gradient: gradient * math.nan)
    before = learned(training)
    with pytest.raises(NonFiniteError, match=rf"^gradient of {name} in minibatch 0 on rank 0$"):
        training.iterate()
    assert differences(before, learned(training)) == []


def test_a_loss_beyond_the_largest_number_is_found() -> None:
    # Rewards of 1e25 are finite, and so are their advantages; the square of the value's error is not.
    training = poisoned("rewards", 1e25)
    before = learned(training)
    with pytest.raises(NonFiniteError, match="minibatch 0"):
        training.iterate()
    assert differences(before, learned(training)) == []


class Witness(SoloComm):
    """Remembers what every minibatch was met with."""

    def __init__(self) -> None:
        self.training: Training | None = None
        self.met: list[dict[str, Any]] = []

    def mean_gradients_(self, gradients: FlatGradients, meanwhile: Callable[[], None] = lambda: None) -> None:
        assert self.training is not None
        self.met.append(learned(self.training))
        super().mean_gradients_(gradients, meanwhile)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_good_minibatches_count_and_nothing_is_changed_from_the_bad_one_on(bad: float) -> None:
    comm = Witness()
    # A divergence that small would let the rate fall with each minibatch.
    training = comm.training = make_training(small_config(agent={"desired_kl": 1e-12}), comm=comm)
    parameter = training.policy.get_parameter("actor.perceptron.0.bias")
    num_calls = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return gradient + bad if num_calls > 2 else gradient

    parameter.register_hook(spoil)
    with pytest.raises(NonFiniteError, match=r"gradient of actor\.perceptron\.0\.bias in minibatch 0"):
        training.iterate()
    # 2 epochs of 2 minibatches, then the search for the cause. The third was the first bad one.
    assert differences(comm.met[0], comm.met[1]) != []
    assert differences(comm.met[1], comm.met[2]) != []
    assert differences(comm.met[2], comm.met[3]) == []
    assert differences(comm.met[2], learned(training)) == []


def test_finite_values_are_left_in_peace() -> None:
    training = poisoned("rewards", 1e4)
    before = learned(training)
    training.iterate()
    assert differences(before, learned(training)) != []


@pytest.mark.parametrize("place", ["rewards", "actor", "critic"])
@pytest.mark.parametrize("normalize", [True, False])
def test_one_bad_rank_stops_all_of_them(place: str, normalize: bool) -> None:
    meeting = Meeting(2)
    tasks = [Poisoned(), Poisoned()]
    config = small_config(agent={"normalize_advantages": normalize})

    def build(rank: int) -> Training:
        return make_training(config, toy_env(tasks[rank], 4, first_env_id=4 * rank), thread_comm(rank, meeting))

    trainings = on_every_rank(meeting, build)
    on_every_rank(meeting, lambda rank: trainings[rank].iterate())
    tasks[1].place = place
    before = learned(trainings[0])

    def work(rank: int) -> str:
        with pytest.raises(NonFiniteError) as caught:
            trainings[rank].iterate()
        return str(caught.value)

    messages = on_every_rank(meeting, work)
    # Bad advantages reach the other rank's as well if they are normalised; where it began is what all ranks name.
    assert messages[0] == messages[1]
    assert messages[0].startswith("rewards" if place == "rewards" else f"{place}_observations")
    assert messages[0].endswith("on rank 1")
    for training in trainings:
        assert differences(before, learned(training)) == []


# --- what the loop makes of it -------------------------------------------------------------------------------------


class Recorder:
    """An observer that keeps everything."""

    save_due = False

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.stop_requested: Literal["interrupted", "preempted"] | None = None
        self.records: list[Metrics] = []
        self.saved: list[int] = []
        self.failures: list[tuple[int, dict[str, Any]]] = []
        self.on_record: Callable[[], None] = lambda: None

    def record(self, metrics: Metrics) -> None:
        self.records.append(metrics)
        self.on_record()

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        self.saved.append(iteration)

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        self.failures.append((iteration, round_trip(content)))
        return self.path


def test_the_loop_saves_the_state_and_says_where_in_one_line() -> None:
    training = poisoned("rewards")
    recorder = Recorder(Path("run/failure_2.pt"))
    message = r"^not finite in iteration 3: rewards at index .*; the state is in run/failure_2.pt; .*learning_rate"
    with pytest.raises(RunError, match=message) as caught:
        loop.train(training, recorder)
    assert "\n" not in str(caught.value)
    ((iteration, content),) = recorder.failures
    assert iteration == content["iteration"] == 2
    assert content["rollout"]["rewards"][:, 1].isnan().all()
    assert content["rollout"]["rewards"][:, 0].isfinite().all()
    assert differences(training.policy.state_dict(), content["policy"]) == []
    assert recorder.records == []
    assert recorder.saved == []


def test_the_loop_does_not_name_a_file_that_could_not_be_written() -> None:
    with pytest.raises(RunError) as caught:
        loop.train(poisoned("rewards"), Recorder(None))
    assert "None" not in str(caught.value)


def test_the_loop_records_saves_and_stops() -> None:
    config = small_config(max_iterations=7, checkpoints={"interval": 3})
    recorder = Recorder(None)
    assert loop.train(make_training(config), recorder) == "finished"
    assert [metrics["iteration"] for metrics in recorder.records] == [1, 2, 3, 4, 5, 6, 7]
    assert recorder.saved == [3, 6, 7]
    walls = [metrics["wall_s"] for metrics in recorder.records]
    assert walls == sorted(walls, key=lambda wall: wall or 0.0)


@pytest.mark.parametrize("reason", ["interrupted", "preempted"])
def test_the_loop_saves_before_it_stops_on_request(reason: Literal["interrupted", "preempted"]) -> None:
    recorder = Recorder(None)

    def stop_in_the_third() -> None:
        recorder.stop_requested = reason if len(recorder.records) == 2 else None

    recorder.on_record = stop_in_the_third
    training = make_training(small_config(max_iterations=7))
    assert loop.train(training, recorder) == reason
    assert recorder.saved == [3]
    # With nothing left to do it has finished, whatever was asked.
    recorder.on_record = lambda: None
    recorder.stop_requested = reason
    assert loop.train(make_training(small_config(max_iterations=1)), recorder) == "finished"
    assert recorder.saved == [3, 1]
