"""The harness of JAX algorithms: the same on any number of ranks, one transfer per iteration, resumed bit for bit."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from lockstep.core import beats
from lockstep.core.errors import RunError, UsageError
from lockstep.core.types import Array
from lockstep.distributed.jax import psum
from lockstep.distributed.jax_mesh import RankMesh
from lockstep.learn.jax.algorithm import Metrics, TrainState
from lockstep.learn.jax.loop import JaxRunner
from lockstep.learn.jax.nests import flatten
from lockstep.learn.jax.training import pad_ids
from tests.unit.jax_training_fixtures import Drift, array_differences, make_drift, untimed

pytestmark = pytest.mark.usefixtures("double_precision")

UNEVEN = (3, 1, 0, 4)


def iterate(training: JaxRunner, count: int) -> list[dict[str, Any]]:
    return [training.iterate() for _ in range(count)]


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return what does not depend on the clock."""
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "steps_per_s"))}


def assert_close(one: Any, other: Any, tolerance: float = 1e-12) -> None:
    first, second = flatten(one), flatten(other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype, name
        np.testing.assert_allclose(
            array.astype(np.float64), second[name].astype(np.float64), rtol=0, atol=tolerance, err_msg=name
        )


def assert_same_curve(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for first, second in zip(one, other, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert second[name] == (None if value is None else pytest.approx(value, abs=1e-12)), name


@pytest.fixture(scope="module")
def on_one() -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Ten iterations, an evaluation and the state of a training on one device."""
    with jax.enable_x64(True):
        training = make_drift(1, max_iterations=20)
        curve = [numbers(metrics) for metrics in iterate(training, 10)]
        return curve, training.evaluate(), training.state_dict()


def test_the_metrics_of_an_iteration(on_one: Any) -> None:
    curve, evaluation, content = on_one
    assert [metrics["env_steps"] for metrics in curve] == [8 * 3 * number for number in range(1, 11)]
    assert [metrics["iteration"] for metrics in curve] == list(range(1, 11))
    assert all(type(curve[0][name]) is int for name in ("iteration", "env_steps"))
    # An episode that began at its beginning ends after three iterations at the earliest: 7 steps are the limit.
    assert curve[0]["mean_return"] is None
    assert isinstance(curve[-1]["mean_episode_length"], float)
    assert "num_steps" not in curve[0] and "nonfinite" not in curve[0]
    assert evaluation["eval/num_episodes"] == 5
    assert (content["iteration"], content["env_steps"]) == (10, 240)
    assert content["sharded"]["env"]["env_ids"].tolist() == list(range(8))


@pytest.mark.parametrize("shares", [(2, 2, 2, 2), UNEVEN], ids=str)
def test_several_ranks_go_the_way_of_one(shares: tuple[int, ...], on_one: Any) -> None:
    curve, evaluation, content = on_one
    training = make_drift(4, num_envs=list(shares), max_iterations=20)
    assert_same_curve(curve, [numbers(metrics) for metrics in iterate(training, 10)])
    assert training.evaluate() == pytest.approx(evaluation, abs=1e-12)
    found = training.state_dict()
    for part in ("replicated", "sharded"):
        assert_close(content[part], found[part])


class Sum(Drift):
    """Adds up the ids of all envs, without stepping one: few operations, as each of them is compiled by itself."""

    CHECKS = ()

    def setup(self, key: Array, env_ids: Array) -> TrainState:
        return TrainState({"total": jnp.zeros((), jnp.int32)}, {"ids": env_ids})

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        own = jnp.where(state.sharded["ids"] >= 0, state.sharded["ids"], 0).sum(dtype=jnp.int32)
        total = state.replicated["total"] + psum(own)
        return TrainState({"total": total}, {"ids": state.sharded["ids"]}), {"num_steps": total}

    def evaluate(self, state: TrainState, env_ids: Array) -> Metrics:
        return {"mean_return": psum((env_ids >= 0).sum(dtype=jnp.int32)) + state.replicated["total"]}

    weights = with_weights = None  # type: ignore[assignment]


@pytest.mark.parametrize("enable_jit", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_without_jit_it_is_the_same(num_ranks: int, enable_jit: bool) -> None:
    num_envs = {1: [8], 4: list(UNEVEN)}[num_ranks]
    training = make_drift(num_ranks, Sum, num_envs=num_envs, enable_jit=enable_jit, max_iterations=20)
    assert [training.iterate()["env_steps"] for _ in range(3)] == [28, 28 + 56, 28 + 56 + 84]
    assert training.evaluate() == {"eval/mean_return": 84 + 5}
    assert training.state_dict()["sharded"]["ids"].tolist() == list(range(8))
    assert jax.tree.leaves(training.state.sharded)[0].sharding == training.ranks.sharded


@pytest.mark.parametrize("shares", [(8,), UNEVEN], ids=str)
def test_ten_and_ten_are_twenty(shares: tuple[int, ...]) -> None:
    envs: dict[str, Any] = {"num_envs": list(shares) if len(shares) > 1 else shares[0], "max_iterations": 20}
    training = make_drift(len(shares), **envs)
    iterate(training, 10)
    saved = training.state_dict()
    curve = [numbers(metrics) for metrics in iterate(training, 10)]
    again = make_drift(len(shares), **envs)
    again.load_state_dict(saved, "model_10")
    assert again.so_far == {"iteration": 10, "env_steps": 240, "wall_s": 0.0}
    assert array_differences(untimed(again.state_dict()), untimed(saved)) == []
    assert [numbers(metrics) for metrics in iterate(again, 10)] == curve
    assert array_differences(untimed(again.state_dict()), untimed(training.state_dict())) == []
    assert array_differences(saved["replicated"], again.state_dict()["replicated"]) == [".num_steps", ".speed"]


def test_a_run_goes_on_with_other_ranks(on_one: Any) -> None:
    content = on_one[2]
    training = make_drift(4, num_envs=list(UNEVEN), max_iterations=20)
    padding = np.flatnonzero(training.env_ids < 0)
    before = jax.tree.map(lambda rows: rows[padding], training.ranks.unshard(training.state.sharded))
    training.load_state_dict(content, "model_10")
    assert array_differences(untimed(training.state_dict()), untimed(content)) == []
    after = jax.tree.map(lambda rows: rows[padding], training.ranks.unshard(training.state.sharded))
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"num_steps": -5}, "gives num_steps -5 in iteration 1; it must be 0 or more"),
        ({"num_steps": math.nan}, "gives num_steps nan in iteration 1; it must be 0 or more"),
        ({"env_steps": -1}, "gives env_steps -1 in iteration 1; it must be at least the 0 before"),
    ],
)
def test_counts_that_cannot_be_are_refused(metrics: dict[str, float], words: str) -> None:
    class Miscounting(Sum):
        def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
            return super().step(state)[0], {name: jnp.asarray(value) for name, value in metrics.items()}

    with pytest.raises(RunError, match=f"{words}$"):
        make_drift(1, Miscounting).iterate()


def test_the_speed_is_what_was_measured() -> None:
    class Boasting(Sum):
        def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
            after, metrics = super().step(state)
            return after, metrics | {"steps_per_s": jnp.asarray(-1.0)}

    speed = make_drift(1, Boasting).iterate()["steps_per_s"]
    assert speed is not None
    assert speed > 0


def test_ids_are_padded_to_the_largest_share() -> None:
    assert pad_ids(UNEVEN).tolist() == [0, 1, 2, -1, 3, -1, -1, -1, -1, -1, -1, -1, 4, 5, 6, 7]
    assert pad_ids((2,)).tolist() == [0, 1]
    assert pad_ids(UNEVEN).dtype == np.int32


def test_an_iteration_is_one_call_and_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_drift(4)
    iterate(training, 1)
    calls: list[str] = []
    read: list[tuple[int, ...]] = []
    step, value = training._step, ArrayImpl._value

    def seen(array: Any) -> Any:
        read.append(array.shape)
        return value.fget(array)

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return work(*arguments)

        return call

    def looked(ranks: RankMesh, tree: Any) -> Any:
        calls.append(str(tree.shape))
        return to_host(ranks, tree)

    monkeypatch.setattr(training, "_step", noted("step", step))
    monkeypatch.setattr(ArrayImpl, "_value", property(seen))
    to_host = RankMesh.to_host
    monkeypatch.setattr(RankMesh, "to_host", looked)
    for name in ("unshard", "shard", "replicate"):
        monkeypatch.setattr(RankMesh, name, lambda *arguments: calls.append("moved"))
    monkeypatch.setattr(training.comm, "gather_text", lambda *arguments: calls.append("text"))
    old = training.state
    training.iterate()
    # Four metrics, two checks and four signals of each rank; and nothing is looked at apart from them.
    assert calls == ["step", f"({4 + 4 * 2 + 4 * 4},)"]
    assert read == []
    assert float(training.state.replicated["speed"][0]) > 0
    assert read != []  # as it would have been seen
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.replicated["speed"]))  # its memory was taken


def test_only_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    training = make_drift(2)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def taking(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any) -> Any:
            clock[0] += seconds
            return work(*arguments)

        return slow

    class Traced:
        def lower(self) -> Any:
            return self

        def compile(self) -> Any:
            clock[0] += 50.0
            return taking(2.0, step)

    step = training._traced.lower().compile()
    monkeypatch.setattr(training, "_traced", Traced())
    first = training.iterate()
    assert first["time/compile"] == 50.0
    assert first["steps_per_s"] == 24 / 2.0
    assert first["time/step_mean"] == 2.0
    monkeypatch.setattr(training, "_step", taking(4.0, step))
    second = training.iterate()
    assert "time/compile" not in second
    assert second["steps_per_s"] == 24 / 4.0
    assert second["time/step_max"] == 2.0  # which each rank has told with this call
    assert training.iterate()["time/step_min"] == 4.0


def test_the_phases_of_an_iteration(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def place() -> tuple[str, str, int]:
        beat = beats.own_beat()
        assert beat is not None
        return beat.phase, beat.exchange, beat.iteration

    seen: list[tuple[str, str, int]] = []
    training = make_drift(1, max_iterations=9)
    to_host = RankMesh.to_host

    def looked(*arguments: Any) -> Any:
        seen.append(place())
        return to_host(*arguments)

    monkeypatch.setattr(RankMesh, "to_host", looked)
    beats.open_beats(tmp_path, 0, 0)
    try:
        training.iterate()
        training.evaluate()
        training.iterate()
        training.evaluate()
        assert place() == ("evaluate", "", 2)
    finally:
        beats.close_beats()
    assert seen == [
        ("compile", "device", 0),
        ("compile", "device", 1),
        ("step", "device", 1),
        ("evaluate", "device", 2),
    ]


def test_what_changed_is_the_algorithms_to_retune(on_one: Any) -> None:
    class Retuned(Drift):
        def retuned(self, replicated: Any, before: dict[str, Any]) -> Any:
            assert before["agent"]["learning_rate"] == 1e-3
            return replicated | {"half": replicated["half"] * 2}

    training = make_drift(1, Retuned, max_iterations=20, agent={"learning_rate": 1e-2})
    training.load_state_dict(on_one[2], "model_10")
    assert array_differences(training.state_dict()["replicated"], on_one[2]["replicated"]) == [".half"]


# --- weights -------------------------------------------------------------------------------------------------------


def test_weights_alone_start_a_new_run(on_one: Any) -> None:
    training = make_drift(2, num_envs=2, dtype="float32")
    before = training.state_dict()
    training.load_weights(on_one[2], "model_10")
    after = training.state_dict()
    assert array_differences(before["sharded"], after["sharded"]) == []
    assert array_differences(after["replicated"], before["replicated"]) == [".speed"]
    np.testing.assert_array_equal(after["replicated"]["speed"], on_one[2]["replicated"]["speed"])
    assert training.so_far == {"iteration": 0, "env_steps": 0, "wall_s": 0.0}
    training.iterate()


class NoWeights(Drift):
    weights = with_weights = None  # type: ignore[assignment]


def test_an_algorithm_without_weights_has_none_to_give() -> None:
    training = make_drift(1, NoWeights)
    with pytest.raises(UsageError, match=r"NoWeights can't start .* has no weights\(\) and with_weights\(\)"):
        training.load_weights(None, "model_10")
    assert training.state_dict()["weights"] == []


def test_weights_are_selected_not_computed(on_one: Any) -> None:
    class Computes(Drift):
        def weights(self, replicated: Any) -> Any:
            return {"speed": (1, replicated["speed"])}

    with pytest.raises(UsageError, match=r"weights\(\) of Computes gives something that is no array of the replicated"):
        make_drift(1, Computes).load_weights(on_one[2], "model_10")


def test_64_bit_types_are_needed() -> None:
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"enter jax.enable_x64\(True\)"):
        make_drift(1)


def test_the_state_of_all_ranks_is_on_the_mesh() -> None:
    training = make_drift(4)
    assert isinstance(training.state, TrainState)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(training.state.replicated))
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(training.state.sharded)} == {jax.P("ranks")}
    assert math.prod(training.state.sharded.distance.shape) == 16
