"""The training loop of JAX: what it records, when it evaluates, saves and stops, and how it fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.core.errors import RunError, UsageError
from lockstep.core.types import Array
from lockstep.learn.jax.algorithm import Metrics, TrainState
from lockstep.learn.jax.loop import JaxRunner
from lockstep.learn.jax.reporting import SIGNALS, agree, own_signals
from tests.unit.jax_training_fixtures import Drift, Recorder, array_differences, make_drift, untimed

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture(scope="module")
def trained() -> tuple[JaxRunner, Recorder, str]:
    with jax.enable_x64(True):
        training = make_drift(2, max_iterations=5, checkpoints={"interval": 2})
        observer = Recorder()
        return training, observer, training.train(observer, None)


def test_everything_is_recorded_evaluated_and_saved(trained: Any) -> None:
    training, observer, status = trained
    assert status == "finished"
    assert [metrics["iteration"] for metrics in observer.recorded] == [1, 2, 3, 4, 5]
    evaluated = [metrics["iteration"] for metrics in observer.recorded if "eval/mean_return" in metrics]
    assert evaluated == [2, 4, 5]  # every second one, and the last
    assert list(observer.saved) == [2, 4, 5]
    walls = [metrics["wall_s"] for metrics in observer.recorded]
    assert walls == sorted(walls) and walls[0] > 0
    assert training.so_far == {"iteration": 5, "env_steps": 120, "wall_s": walls[-1]}
    assert observer.saved[4]["wall_s"] == walls[3]
    assert [observer.saved[number]["iteration"] for number in (2, 4, 5)] == [2, 4, 5]
    assert array_differences(untimed(observer.saved[5]), untimed(training.state_dict())) == []
    assert array_differences(observer.saved[4]["replicated"], observer.saved[5]["replicated"]) != []


def test_a_run_that_goes_on_counts_on(trained: Any) -> None:
    _, before, _ = trained
    training = make_drift(1, max_iterations=5, evaluation={"interval": 0})
    training.load_state_dict(before.saved[4], "model_4")
    observer = Recorder()
    assert training.train(observer) == "finished"
    (metrics,) = observer.recorded
    assert (metrics["iteration"], metrics["env_steps"]) == (5, 120)
    assert metrics["wall_s"] > before.saved[4]["wall_s"]
    assert not any(name.startswith("eval/") for name in metrics)
    assert list(observer.saved) == [5]
    assert (
        array_differences(
            {"speed": observer.saved[5]["replicated"]["half"]}, {"speed": before.saved[5]["replicated"]["half"]}
        )
        == []
    )
    assert training.train(observer) == "finished"
    assert len(observer.recorded) == 1


def test_a_stop_saves_and_ends(trained: Any) -> None:
    training = make_drift(2, max_iterations=9, evaluation={"interval": 0})
    observer = Recorder(stop_at=3)
    assert training.train(observer) == "preempted"
    assert len(observer.recorded) == 3
    assert list(observer.saved) == [3]


def test_the_last_iteration_is_the_end_whoever_asks_to_stop_in_it() -> None:
    training = make_drift(1, max_iterations=2, evaluation={"interval": 0})
    assert training.train(Recorder(stop_at=2)) == "finished"


def test_a_clock_asks_for_a_checkpoint() -> None:
    training = make_drift(2, max_iterations=3, evaluation={"interval": 0})
    observer = Recorder()
    record = observer.record

    def and_wait(metrics: dict[str, Any]) -> None:
        record(metrics)
        observer.save_due = len(observer.recorded) == 1

    observer.record = and_wait  # type: ignore[method-assign]
    training.train(observer)
    assert list(observer.saved) == [2, 3]


def test_what_ranks_ask_for_is_agreed_on() -> None:
    nothing = own_signals(None, False, 0.5, 2)
    assert nothing.shape == (2, len(SIGNALS)) and nothing.dtype == np.float64

    def of(*rows: tuple[Any, bool]) -> tuple[Any, ...]:
        return tuple(agree(np.concatenate([own_signals(stop, due, 0.5, 1) for stop, due in rows])))

    assert of((None, False), (None, False)) == (None, False)
    assert of((None, False), ("preempted", False)) == ("preempted", False)
    assert of(("preempted", False), (None, False), ("interrupted", False)) == ("interrupted", False)
    assert of((None, True), (None, False)) == (None, True)
    assert of((None, False), (None, True)) == (None, False)  # rank 0 writes, and its clock counts


# --- what goes wrong -----------------------------------------------------------------------------------------------


class Spoiled(Drift):
    """The positions of rank 2 are not finite in the third iteration."""

    def spoil(self, positions: Array, old: dict[str, Array]) -> Array:
        is_bad = (old["num_steps"] == 6) & (jax.lax.axis_index("ranks") == 2)
        return jnp.where(is_bad, jnp.nan, positions)


@pytest.mark.parametrize("folder", [Path("failure_2"), None])
def test_what_is_not_finite_is_named_and_the_state_is_saved(folder: Path | None) -> None:
    training = make_drift(4, Spoiled, max_iterations=9)
    observer = Recorder(folder=folder)
    with pytest.raises(RunError) as caught:
        training.train(observer)
    message = str(caught.value)
    assert "not finite in iteration 3: positions on rank 2; " in message
    assert ("the state is in failure_2" if folder else "the state could not be saved") in message
    assert "\n" not in message
    assert caught.value.shared
    assert len(observer.recorded) == 2
    assert list(observer.failures) == [2]
    assert observer.failures[2]["iteration"] == 2
    assert np.isnan(observer.failures[2]["replicated"]["speed"]).all()


def test_the_earliest_check_of_all_ranks_is_named() -> None:
    training = make_drift(4, Spoiled, max_iterations=9, evaluation={"interval": 0})
    for _ in range(2):
        training.iterate()
    with pytest.raises(Exception, match="positions on rank 2"):
        training.iterate()
    with pytest.raises(Exception, match=r"^speed on rank 0$"):  # which all ranks have, and before their positions
        training.iterate()


Step = Callable[[Drift, TrainState], tuple[TrainState, Metrics]]


def unreduced_metric(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return after, metrics | {"mine": after.sharded.distance.sum()}


def vector_metric(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return after, metrics | {"two": after.replicated["speed"][:1]}


def word_as_metric(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return after, metrics | {"mood": "good"}


def no_value(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return after, metrics | {"mood": None}


def numbered_metric(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    by_number: Any = {3: 1.0}
    return after, metrics | by_number


def unreduced_state(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return after._replace(replicated=after.replicated | {"speed": after.sharded.distance.sum(0)[:1]}), metrics


def other_dtype(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return after._replace(replicated=after.replicated | {"num_steps": jnp.zeros((), jnp.int64)}), metrics


def other_structure(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return after._replace(replicated=after.replicated | {"more": jnp.zeros((), jnp.int64)}), metrics


def no_count(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return after, {name: value for name, value in metrics.items() if name != "num_steps"}


def other_checks(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return after, metrics | {"nonfinite": metrics["nonfinite"][0]}


def no_state(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    after, metrics = Drift.step(self, state)
    return tuple(after), metrics  # type: ignore[return-value]


def no_metrics(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    return Drift.step(self, state)[0]


def nothing(self: Drift, state: TrainState) -> tuple[TrainState, Metrics]:
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (unreduced_metric, "Broken.step() gives the metric mine as each rank has it, not reduced over ranks; use psum"),
        (vector_metric, "Broken.step() gives the metric two of shape (1,); reduce it to a scalar"),
        (word_as_metric, "Broken.step() gives the metric mood as a str; it must be a number, NaN for no value"),
        (no_value, "Broken.step() gives the metric mood as a NoneType; it must be a number, NaN for no value"),
        (numbered_metric, "Broken.step() gives a metric by the name 3; name it by a string"),
        (unreduced_state, "Broken.step() gives replicated.speed as each rank has it, not the same on all; reduce it"),
        (
            other_dtype,
            "Broken.step() makes replicated.num_steps int64[] of int32[]; keep its shape and give it a dtype",
        ),
        (other_structure, "gives a state of another structure than it takes: replicated.more is only after it"),
        (no_count, "Broken.step() gives no metric num_steps"),
        (other_checks, "gives the metric nonfinite of shape (2,); it must be (2, 2): (num_ranks, len(CHECKS))"),
        (no_metrics, "Broken.step() gives a TrainState; it must give both a TrainState and a dict of metrics"),
        (nothing, "Broken.step() gives a NoneType; it must give both a TrainState and a dict of metrics"),
        (no_state, "Broken.step() gives a tuple; it must give a TrainState(replicated, sharded)"),
    ],
)
def test_an_algorithm_that_breaks_the_protocol_is_told_how(step: Step, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_drift(2, type("Broken", (Drift,), {"step": step}))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_evaluation_without_metrics_is_told() -> None:
    silent = type("Silent", (Drift,), {"evaluate": lambda self, state, env_ids: None})
    with pytest.raises(UsageError, match=r"^Silent.evaluate\(\) gives a NoneType; it must give a dict of metrics"):
        make_drift(2, silent)


def test_a_state_of_one_array_has_a_name_too() -> None:
    class Plain(Drift):
        def setup(self, key: Array, env_ids: Array) -> TrainState:
            return TrainState(env_ids.astype(jnp.float32), env_ids)

    class Number(Drift):
        def setup(self, key: Array, env_ids: Array) -> TrainState:
            return TrainState(jnp.zeros(2), jnp.zeros(()))

    with pytest.raises(UsageError, match=r"Plain.setup\(\) gives replicated as each rank has it, not the same on all"):
        make_drift(2, Plain)
    with pytest.raises(UsageError, match=r"Number.setup\(\) gives sharded as a number; it must lead with the envs"):
        make_drift(2, Number)


def test_rows_that_are_no_envs_are_refused() -> None:
    class Odd(Drift):
        def setup(self, key: Array, env_ids: Array) -> TrainState:
            state = super().setup(key, env_ids)
            return state._replace(sharded=state.sharded._replace(distance=jnp.zeros((5, 2), jnp.float32)))

    with pytest.raises(UsageError, match=r"sharded.distance of 5 rows on each rank; it must lead with the 4 envs"):
        make_drift(2, Odd)
