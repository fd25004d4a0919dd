"""The PPO update in JAX: the same on any number of ranks, and what an iteration reports."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.distributed.jax import REPLICATED, SHARDED
from lockstep.learn.jax.algorithm import TrainState
from lockstep.learn.jax.ppo import RIDERS, Ppo
from lockstep.tasks.cartpole_classic.task import CartpoleClassic
from tests.unit.jax_ppo_fixtures import PpoOnRanks, difference, jax_env
from tests.unit.ppo_fixtures import KINDS, config_of
from tests.unit.watched_fixtures import watched

# In one process, so that the tests share what was compiled.
pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.xdist_group("jax_ppo")]

SIZES = [(8,), (2, 2, 2, 2), (6, 2)]
ITERATIONS = 20


@pytest.fixture(scope="module", autouse=True)
def _watched() -> Iterator[None]:
    with watched(CartpoleClassic):
        yield


@functools.cache
def compiled(shares: tuple[int, ...]) -> PpoOnRanks:
    return PpoOnRanks(config_of(schedule="fixed"), shares)


@functools.cache
def curve(shares: tuple[int, ...]) -> tuple[TrainState, list[dict[str, Any]]]:
    """The state after all iterations, and the metrics of each."""
    training = compiled(shares)
    training.restart()
    metrics = [training.iterate() for _ in range(ITERATIONS)]
    return training.state, metrics


def assert_same_curve(metrics: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    for ours, theirs in zip(metrics, expected, strict=True):
        assert not ours["nonfinite"].any()
        for name in theirs.keys() - {"nonfinite"}:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("shares", SIZES[1:])
def test_ranks_together_learn_what_one_does(shares: tuple[int, ...]) -> None:
    state, metrics = curve(shares)
    alone, expected = curve((8,))
    # Measured: 2e-13, rounding that 160 steps of Adam have amplified.
    assert difference(state.replicated, alone.replicated) < 1e-11
    assert_same_curve(metrics, expected, 1e-9)
    assert difference(metrics[0]["gradient_norm"], expected[0]["gradient_norm"]) < 1e-12
    assert int(state.replicated.env_steps) == ITERATIONS * 6 * 8
    assert float(state.replicated.weights.actor_normalizer.count) == ITERATIONS * 6 * 8


def test_ranks_of_memories_and_an_adaptive_rate_learn_what_one_does() -> None:
    config = config_of("discrete", "gru", schedule="adaptive", desired_kl=1e-4)
    alone, ranks = PpoOnRanks(config), PpoOnRanks(config, (4, 2, 2))
    expected, metrics = ([training.iterate() for _ in range(5)] for training in (alone, ranks))
    assert_same_curve(metrics, expected, 1e-9)
    assert difference(alone.replicated, ranks.replicated) < 1e-11
    assert len({float(each["learning_rate"]) for each in metrics}) > 1


def test_metrics() -> None:
    _, curve_metrics = curve((6, 2))
    for iteration, metrics in enumerate(curve_metrics, start=1):
        assert metrics["iteration"] == iteration
        assert metrics["env_steps"] == iteration * 6 * 8
        assert metrics["num_steps"] == 6 * 8
    expected = {"iteration", "env_steps", "num_steps", "mean_return", "mean_episode_length", "num_episodes"}
    expected |= {"reward/alive", "kl", "learning_rate", "gradient_norm", "num_diverged", "nonfinite"}
    expected |= {"metric/distance", "metric/is_step"}
    assert metrics.keys() == expected | {f"loss/{name}" for name in RIDERS if name != "kl"}
    assert metrics["nonfinite"].shape == (2, len(Ppo.CHECKS))
    assert np.isfinite([metrics[name] for name in expected - {"nonfinite"}]).all()
    # Episodes of 9 steps at most, the first ones cut shorter: in 6 steps not every rank need end one.
    assert np.isnan(curve_metrics[0]["mean_return"]) == (curve_metrics[0]["num_episodes"] == 0)
    # Metrics are means over the env steps of those episodes.
    steps = [metrics["metric/is_step"] for metrics in curve_metrics if metrics["num_episodes"] > 0]
    assert steps == [1.0] * len(steps) != []
    assert np.isnan([metrics["metric/distance"] for metrics in curve_metrics]).sum() == ITERATIONS - len(steps)
    assert 0 < metrics["metric/distance"] < 2.4


def test_an_evaluation_is_shared_out_to_the_ranks() -> None:
    results = {}
    for shares in SIZES:
        training = compiled(shares)
        training.restart()
        results[shares] = training.evaluate(7)
        assert training.evaluate(7) == results[shares]  # the same episodes each time
    alone = results[(8,)]
    terms = {"reward/alive", "metric/distance", "metric/is_step"}
    assert alone.keys() == {"mean_return", "mean_episode_length"} | terms
    assert alone["mean_return"] == alone["mean_episode_length"] > 1
    assert alone["metric/is_step"] == 1
    assert 0 < alone["metric/distance"] < 2.4
    for shares in SIZES[1:]:
        assert results[shares] == pytest.approx(alone, rel=1e-12)


# --- what is not finite --------------------------------------------------------------------------------------------


def with_observation(state: TrainState, env: int, value: float) -> TrainState:
    """Make the first entry of what one row's actor sees next another number."""
    observations = state.sharded.env.observations
    changed = observations | {"actor": observations["actor"].at[env, 0].set(value)}
    return state._replace(sharded=state.sharded._replace(env=state.sharded.env._replace(observations=changed)))


def test_a_bad_tensor_is_named_and_changes_nothing() -> None:
    training = compiled((6, 2))
    training.restart()
    training.iterate()
    kept = jax.tree.map(np.asarray, training.replicated)
    training.state = with_observation(training.state, 7, np.inf)  # rank 1's second env
    metrics = training.iterate()
    table = metrics["nonfinite"]
    assert not table[0].any()
    found = [name for name, flag in zip(Ppo.CHECKS, table[1], strict=True) if flag]
    assert found[0] == "actor_observations"
    assert found[-1] == "gradients"
    assert difference(kept, training.replicated) == 0
    assert metrics["iteration"] == 1
    # Nor does it go on later: the flag is of this iteration alone.
    assert not training.iterate()["nonfinite"].any()


def test_bad_parameters_are_the_first_cause_on_every_rank() -> None:
    training = compiled((6, 2))
    training.restart()
    weights = training.replicated.weights
    bad = dict(weights.parameters) | {"log_std": jnp.full_like(weights.parameters["log_std"], np.nan)}
    training.load(weights._replace(parameters=bad))
    table = training.iterate()["nonfinite"]
    assert table[:, Ppo.CHECKS.index("parameters")].all()


def test_padding_counts_nowhere_whatever_is_in_it() -> None:
    training = compiled((6, 2))
    training.restart()
    training.state = with_observation(training.state, 8, np.nan)  # of rank 1's envs, 6 to 11, only two are real
    metrics = training.iterate()
    assert not metrics["nonfinite"].any()
    assert_same_curve([metrics], curve((8,))[1][:1], 1e-9)


# --- what the compiler says ----------------------------------------------------------------------------------------


def lowered(algorithm: Any, num_ranks: int) -> str:
    training = PpoOnRanks(config_of(), (2,) * num_ranks, algorithm=algorithm, is_set_up=False)
    text: str = training.lowered_step().as_text()
    return text


def test_one_collective_per_minibatch_and_two_per_iteration() -> None:
    text = lowered(Ppo, 2)
    # The loop over minibatches is written down once; moments travel by all_gather.
    assert text.count("stablehlo.all_reduce") == 2
    assert text.count("stablehlo.all_gather") == 1
    assert text.count("stablehlo.collective") == 0


class WithOwnReturn(Ppo):
    """Reports an episode statistic of one rank as if it were all ranks'."""

    def step(self, state: TrainState) -> Any:
        after, metrics = super().step(state)
        return after, metrics | {"mean_return": after.sharded.env.running.mean()}


def test_a_metric_that_is_not_reduced_is_refused() -> None:
    with pytest.raises(ValueError, match="require replication"):
        lowered(WithOwnReturn, 2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(("kind", "recurrent"), KINDS)
def test_no_array_changes_its_shape_or_dtype(kind: str, recurrent: str, dtype: str) -> None:
    config = config_of(kind, recurrent).model_copy(update={"dtype": dtype})
    algorithm = Ppo(config, jax_env(config), jax_env(config, "evaluation"))
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    state = jax.eval_shape(algorithm.setup, jax.random.key(1), ids)
    after, metrics = jax.eval_shape(algorithm.step, state)
    assert after == state
    assert {leaf.dtype for leaf in jax.tree.leaves(state.replicated.weights.parameters)} == {
        jnp.dtype("float64" if dtype == "float64" else "float32")
    }
    assert {value.shape for name, value in metrics.items() if name != "nonfinite"} == {()}
    memory = algorithm.initial_memory(8)
    actions, after_memory = jax.eval_shape(algorithm.act, state.replicated, state.sharded.env.observations, memory)
    assert (after_memory.shape, after_memory.dtype) == (memory.shape, memory.dtype)
    assert actions.shape == ((8, 1) if kind == "continuous" else (8,))


def test_bfloat16_is_for_the_networks_alone() -> None:
    config = config_of("continuous", "gru").model_copy(update={"dtype": "bfloat16"})
    algorithm = Ppo(config, jax_env(config), None)
    state = jax.eval_shape(algorithm.setup, jax.random.key(1), jax.ShapeDtypeStruct((8,), jnp.int32))
    text = jax.jit(algorithm.step).lower(state).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all("bf16" in line for line in products)


def test_the_specs_of_the_state_are_those_of_the_protocol() -> None:
    training = compiled((6, 2))
    training.restart()
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(training.state.replicated)} == {REPLICATED}
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(training.state.sharded)} == {SHARDED}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(training.state.sharded)} == {12}
