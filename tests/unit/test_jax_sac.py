"""Soft actor-critic as a whole: the same on any number of devices, and faults that would make it differ are seen."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import pytest
from numpy.typing import NDArray

from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace, State
from lockstep.distributed.jax_mesh import REPLICATED, SHARDED, make_mesh
from lockstep.learn.jax import sac_update
from lockstep.learn.jax.algorithm import TrainState
from lockstep.learn.jax.gradients import MeanGradients, mean_gradients
from lockstep.learn.jax.replay import Places, SampleNoise
from lockstep.learn.jax.sac import Sac
from lockstep.learn.jax.statistics import axis_index
from lockstep.tasks.cartpole_classic.task import TIMESTEP, CartpoleClassic
from tests.unit.sac_fixtures import STATE, Run, largest_difference, make_env, run, small_config
from tests.unit.watched_fixtures import watched

NUM_ITERATIONS = 6
STARTED = 3  # index of the iteration in which the 200 steps of learning_starts are over: 16 envs make 64 in each
FOUR_RANKS = small_config(num_envs=(8, 4, 4, 0))  # padded to 8 on each


@pytest.fixture(autouse=True)
def _float64(double_precision: None) -> None:
    """As in a training."""


@pytest.fixture(scope="module", autouse=True)
def _watched() -> Iterator[None]:
    with watched(CartpoleClassic):
        yield


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Run]:
    with jax.enable_x64(True):
        yield run(small_config(), 1, NUM_ITERATIONS)


def experience(found: Run, index: int) -> dict[str, NDArray[numpy.float64]]:
    """Return what the replays of all ranks hold after so many iterations, ``(num_envs, capacity, ...)``."""
    sharded = found.states[index].sharded
    rows = jnp.asarray(sharded.replay[sharded.env.env_ids >= 0])
    return {name: numpy.asarray(part) for name, part in found.algorithm.layout.unpack(rows)._asdict().items()}


def difference(one: Run, other: Run) -> float:
    """Return by how much two runs differ in parameters, normalisers, counters, metrics or replays."""
    differences = [
        max(
            largest_difference(state.replicated, other.states[index].replicated),
            largest_difference(experience(one, index), experience(other, index)),
        )
        for index, state in enumerate(one.states)
    ]
    for metrics, others in zip(one.metrics, other.metrics, strict=True):
        for name in metrics.keys() - {"nonfinite"}:
            assert numpy.isnan(metrics[name]) == numpy.isnan(others[name]), name
            differences.append(float(numpy.nan_to_num(abs(metrics[name] - others[name]))))
    return max(differences)


def test_learning_starts_when_all_envs_together_have_made_enough_steps(one_rank: Run) -> None:
    assert [int(metrics["num_updates"]) for metrics in one_rank.metrics] == [0, 0, 0, 3, 3, 3]
    assert [int(metrics["env_steps"]) for metrics in one_rank.metrics] == [64, 128, 192, 256, 320, 384]
    for index, metrics in enumerate(one_rank.metrics):
        before, after = (state.replicated.learner for state in one_rank.states[index : index + 2])
        assert (largest_difference(before, after) > 0) == (index >= STARTED)
        assert numpy.isnan(metrics["loss/critic"]) == (index < STARTED)
    # Random actions are 2 u - 1 for a u of 24 bits; the policy's have more. The step that begins at 192 is random yet.
    actions = experience(one_rank, 4)["actions"][:, :16, 0]
    are_random = (numpy.mod((actions + 1) * 2.0**23, 1) == 0).all(axis=0)
    assert are_random.tolist() == [True] * 13 + [False] * 3
    assert numpy.abs(actions).max() < 1


def test_metrics_of_the_task_are_means_over_env_steps(one_rank: Run) -> None:
    ended = [metrics for metrics in one_rank.metrics if metrics["num_episodes"] > 0]
    assert [float(metrics["metric/is_step"]) for metrics in ended] == [1.0] * len(ended) != []
    assert all(0 < metrics["metric/distance"] < 2.4 for metrics in ended)
    assert sum(numpy.isnan(metrics["metric/distance"]) for metrics in one_rank.metrics) == NUM_ITERATIONS - len(ended)


def test_several_ranks_take_the_steps_of_one(one_rank: Run) -> None:
    four = run(FOUR_RANKS, 4, NUM_ITERATIONS)
    assert difference(one_rank, four) < 1e-9
    assert not any(metrics["nonfinite"].any() for metrics in four.metrics)
    # Each rank keeps the steps of its own envs, and of nobody else's.
    sharded = four.states[-1].sharded
    assert sharded.env.env_ids.reshape(4, 8).tolist() == [
        list(range(8)),
        [8, 9, 10, 11, -1, -1, -1, -1],
        [12, 13, 14, 15, -1, -1, -1, -1],
        [-1] * 8,
    ]


def test_several_ranks_take_the_steps_of_one_where_blocks_of_envs_share_a_sample() -> None:
    few = {"batch_size": 8, "learning_starts": 64}
    one = run(small_config(few), 1, 3)
    assert difference(one, run(small_config(few, num_envs=(6, 10)), 2, 3)) < 1e-9
    assert int(one.metrics[-1]["num_updates"]) == 3


def test_noise_that_is_the_same_on_every_rank_is_seen(one_rank: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = SampleNoise.draw

    def by_place_on_the_rank(self: SampleNoise, places: Places, update: jax.Array) -> jax.Array:
        return draw(self, places._replace(env_ids=places.rows), update)

    monkeypatch.setattr(SampleNoise, "draw", by_place_on_the_rank)
    assert difference(one_rank, run(FOUR_RANKS, 4, NUM_ITERATIONS)) > 1e-6


def test_gradients_that_are_summed_twice_are_seen(one_rank: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sac_update, "local_parameters", lambda tree: tree)
    assert difference(one_rank, run(FOUR_RANKS, 4, NUM_ITERATIONS)) > 1e-6


def test_a_gradient_of_the_temperature_that_is_not_reduced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_the_temperature(gradients: dict[str, jax.Array], *rest: jax.Array) -> MeanGradients:
        mean = mean_gradients(gradients, *rest)
        return mean._replace(gradients={**mean.gradients, "log_temperature": gradients["log_temperature"]})

    monkeypatch.setattr(sac_update, "mean_gradients", all_but_the_temperature)
    with pytest.raises((TypeError, ValueError), match="varying"):
        run(FOUR_RANKS, 4)


def test_the_time_limit_goes_on_and_a_fall_does_not(one_rank: Run) -> None:
    seen = experience(one_rank, 6)
    filled = {name: array[:, :16] for name, array in seen.items()}
    before, after = filled["actor_observations"], filled["next_actor_observations"]
    new = numpy.roll(before, -1, axis=1)
    ended = ~numpy.all(numpy.isclose(after, new), axis=-1)[:, :-1]
    fell = filled["terminated"][:, :-1].astype(bool)
    assert ended.any()
    assert (fell <= ended).all()
    assert (ended & ~fell).any()
    # What follows a step is where physics led to, not where the next episode starts: x + dt v, theta + dt omega.
    goes_on = ~filled["terminated"].astype(bool)
    numpy.testing.assert_allclose(after[goes_on][:, :2], (before[..., :2] + TIMESTEP * before[..., 2:])[goes_on])
    assert (filled["rewards"] == 1).all()


# --- what the harness asks of it ------------------------------------------------------------------------------------


def test_what_is_not_finite_is_named_by_rank_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = CartpoleClassic.rewards

    def spoiled(self: CartpoleClassic, xp: Any, state: State, action: jax.Array) -> dict[str, jax.Array]:
        terms = rewards(self, xp, state, action)
        is_bad = (axis_index() == 1) & (jnp.arange(state.qpos.shape[0]) == 2)
        return {"alive": jnp.where(is_bad, jnp.nan, terms["alive"])}

    monkeypatch.setattr(CartpoleClassic, "rewards", spoiled)
    found = run(small_config({"learning_starts": 0}, num_envs=(12, 4)), 2, 1)
    table = dict(zip(Sac.CHECKS, found.metrics[0]["nonfinite"].T.tolist(), strict=True))
    assert table.pop("rewards") == table.pop("gradients") == [False, True]
    assert table.keys() == {
        "parameters",
        "actor_observations",
        "critic_observations",
        "actions",
        "next_actor_observations",
        "next_critic_observations",
    }
    assert not numpy.any(list(table.values()))
    assert largest_difference(found.states[0].replicated, found.states[1].replicated) == 0.0


def test_discrete_actions_are_refused() -> None:
    config = small_config(env={"action_kind": "discrete"})
    with pytest.raises(UsageError, match=r"sac needs continuous actions, and those of task cartpole_classic are discr"):
        Sac(config, make_env(config), None)


def test_actions_without_bounds_are_refused() -> None:
    config = small_config()
    env = make_env(config)
    env.task.action_space = ActionSpace("continuous", 1, numpy.inf)
    with pytest.raises(UsageError, match=r"sac chooses actions within bounds, and those of task cartpole_classic have"):
        Sac(config, env, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_array_keeps_its_dtype(dtype: str) -> None:
    config = small_config(dtype=dtype)
    ranks = make_mesh(jax.devices()[:2])
    algorithm = Sac(config, make_env(config), make_env(config, "eval"))
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)
    setup = ranks.compile(lambda own: algorithm.setup(jax.random.key(0), own), (SHARDED,), STATE)
    before = jax.eval_shape(setup, ids)
    after, metrics = jax.eval_shape(ranks.compile(algorithm.step, (STATE,), (STATE, REPLICATED)), before)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), before
    )
    learner = before.replicated.learner
    floats = {leaf.dtype for leaf in jax.tree.leaves(learner) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats == {jnp.dtype(jnp.float32)}
    assert before.sharded.replay.dtype == jnp.float32
    program = jax.make_jaxpr(lambda actor, rows: algorithm.networks.policy(actor, rows).mean)(
        algorithm.networks.initialise(jax.random.key(0))["actor"], jnp.zeros((3, 4), jnp.float32)
    )
    assert ("bf16" in str(program)) == (dtype == "bfloat16")
    assert metrics["loss/critic"].shape == ()


def test_the_policy_is_squashed_into_its_range_and_evaluated(one_rank: Run) -> None:
    algorithm, state = one_rank.algorithm, one_rank.states[-1]
    observations = {"actor": jnp.asarray(numpy.random.default_rng(0).normal(size=(5, 4)) * 100)}
    actions, memory = algorithm.act(state.replicated, observations, algorithm.initial_memory(5))
    assert actions.shape == (5, 1)
    assert memory.shape[0] == 5
    assert 0.9 < numpy.abs(actions).max() <= 1
    ranks = one_rank.ranks
    placed = TrainState(ranks.replicate(state.replicated), ranks.shard(state.sharded))
    ids = ranks.shard(numpy.arange(4, dtype=numpy.int32))
    evaluate = ranks.compile(algorithm.evaluate, (STATE, SHARDED), REPLICATED)
    metrics = evaluate(placed, ids)
    # A pole stays up for longer than an episode of 12 steps whatever is done, and each step earns 1.
    assert float(metrics["mean_return"]) == float(metrics["mean_episode_length"])
    assert 8 <= float(metrics["mean_return"]) <= 12
    assert float(metrics["metric/is_step"]) == 1


def test_weights_make_the_policy_and_leave_the_counters(one_rank: Run) -> None:
    algorithm, trained, new = one_rank.algorithm, one_rank.states[-1].replicated, one_rank.states[0].replicated
    taken = algorithm.with_weights(new, algorithm.weights(trained))
    observations = {"actor": jnp.ones((2, 4))}
    actions = [algorithm.act(each, observations, algorithm.initial_memory(2))[0] for each in (trained, taken, new)]
    numpy.testing.assert_array_equal(actions[0], actions[1])
    assert not numpy.array_equal(actions[0], actions[2])
    assert largest_difference(taken.learner.target_critics, trained.learner.target_critics) == 0.0
    assert largest_difference(taken.learner.optimizer, new.learner.optimizer) == 0.0
    assert largest_difference(taken.counters, new.counters) == 0.0
