"""Envs of libraries of JAX: resets, time limits, diverged envs and sums over episodes, worked out by hand."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace
from lockstep.distributed.jax_mesh import SHARDED
from lockstep.envs.config import JaxGuestConfig
from lockstep.envs.jax_guest import BraxStyleGuest, GuestStep, JaxGuestTask, observation_groups
from lockstep.envs.jax_guest_env import JaxGuestEnv
from tests.unit.jax_env_fixtures import Player
from tests.unit.jax_fixtures import NUM_RANKS, ranks_of
from tests.unit.jax_guest_fixtures import Walker, walkers

pytestmark = pytest.mark.usefixtures("double_precision")


def test_a_failed_episode_ends_and_the_next_begins_from_the_librarys_reset() -> None:
    player = walkers(range(2))
    first, second = player.positions
    assert (player.env.dtype, player.state.physics["position"].dtype) == (jnp.float64, jnp.float32)
    transition = player.step(1.0, 0.5)
    assert transition.reward.tolist() == [1.0, 0.5]
    assert player.positions == pytest.approx([first + 1.0, second + 0.5])
    transition = player.step(2.5, 0.5)
    assert transition.terminated.tolist() == [True, False]
    assert transition.truncated.tolist() == [False, False]
    # The step's own observation is kept beside that of the new episode, which has begun anew in all it knows.
    assert transition.final_observations["actor"].flatten().tolist() == pytest.approx([first + 3.5, second + 1.0])
    assert transition.final_observations["critic"][:, 1].tolist() == [2.0, 2.0]
    assert transition.observations["critic"][:, 1].tolist() == [0.0, 2.0]
    assert 0.0 <= player.positions[0] < 1.0
    assert player.positions[0] != first
    assert player.state.physics["age"].tolist() == [0, 2]
    assert player.state.episode_length.tolist() == [0, 2]


def test_both_time_limits_truncate_and_a_failure_in_the_last_step_is_a_failure() -> None:
    player = walkers(range(2), max_episode_steps=3)
    player.step(0.0, 0.0)
    player.step(0.0, 0.0)
    transition = player.step(0.25, 4.0)
    assert transition.truncated.tolist() == [True, False]
    assert transition.terminated.tolist() == [False, True]
    assert transition.final_observations["critic"][:, 1].tolist() == [3.0, 3.0]
    own = walkers(range(1), own_limit=2, max_episode_steps=3)
    assert not own.step(0.0).done.any()
    assert own.step(0.0).truncated.tolist() == [True]
    assert own.state.episode_length.tolist() == [0]


def test_what_is_not_finite_ends_the_episode_and_reaches_nobody() -> None:
    player = walkers(range(2))
    before = player.positions
    player.step(1.0, 1.0)
    transition = player.step(-9.0, 1.0)
    assert transition.terminated.tolist() == [True, False]
    assert transition.reward.tolist() == [0.0, 1.0]
    assert transition.final_observations["actor"].flatten().tolist() == pytest.approx([before[0] + 1, before[1] + 2])
    assert int(transition.num_diverged) == 1
    # Reward, luck, length, number: the failed step counts in the length alone.
    reward, _, *rest = transition.finished.tolist()
    assert (reward, rest) == (1.0, [2.0, 1.0])
    assert np.isfinite(player.positions).all()
    padded = walkers([-1])
    transition = padded.step(-9.0)
    assert (int(transition.num_diverged), transition.finished.tolist()) == (0, [0.0] * 4)


def test_a_metric_that_is_not_finite_counts_as_nothing_and_ends_nothing() -> None:
    player = walkers(range(1), max_episode_steps=3)
    luck = [float(player.step(0.5).terms[0, 1])]
    transition = player.step(0.125)
    assert (transition.terms.tolist(), transition.done.tolist()) == ([[0.125, 0.0]], [False])
    assert int(transition.num_diverged) == 0
    transition = player.step(0.5)
    luck.append(float(transition.terms[0, 1]))
    assert transition.finished.tolist() == pytest.approx([1.125, sum(luck), 3.0, 1.0])


def test_any_number_of_episodes_may_end_in_one_step() -> None:
    player = walkers(range(50))  # more than are reset at a time
    starts = [player.positions]
    for ending in (range(50), range(0, 50, 2), range(49, 50), range(17)):
        before = player.positions
        transition = player.step(*[4.0 if index in ending else 0.0 for index in range(50)])
        assert np.flatnonzero(np.asarray(transition.terminated)).tolist() == list(ending)
        after = player.positions
        assert [index for index in range(50) if after[index] != before[index]] == list(ending)
        starts.append([after[index] for index in ending])
    fresh = [start for several in starts for start in several]
    assert len(set(fresh)) == len(fresh)  # an episode begins like no other


def test_envs_meet_the_same_whoever_shares_their_batch() -> None:
    together, alone = walkers(range(8), max_episode_steps=2), walkers([5], max_episode_steps=2)
    for _ in range(5):
        whole, one = together.step(*[0.5] * 8), alone.step(0.5)
        assert whole.observations["critic"][5].tolist() == one.observations["critic"][0].tolist()
        assert whole.terms[5].tolist() == one.terms[0].tolist()
    for arguments in ({"seed": 2}, {"streams": "evaluation"}):
        assert not set(walkers(range(8), **arguments).positions) & set(walkers(range(8)).positions)


def test_it_is_the_same_on_any_number_of_devices() -> None:
    env = walkers(range(1), max_episode_steps=3).env

    def play(env_ids: jax.Array) -> Any:
        def step(state: Any, noise: Any) -> Any:
            state, transition = env.step(state, state.observations["actor"] - 0.2, noise)
            return state, (transition.final_observations, transition.terms, transition.done)

        state, told = jax.lax.scan(step, env.reset(env_ids), env.noise(env_ids, 1, 8))
        return state, jax.tree.map(lambda table: jnp.swapaxes(table, 0, 1), told)

    found = []
    for num_ranks in NUM_RANKS:
        ranks = ranks_of(num_ranks)
        env_ids = ranks.shard(np.asarray([0, 1, 2, 3, 4, 5, -1, -1], np.int32))
        found.append(jax.tree.map(np.asarray, ranks.compile(play, (SHARDED,), SHARDED)(env_ids)))
    for other in found[1:]:
        assert jax.tree.all(jax.tree.map(np.array_equal, found[0], other))
    assert found[0][1][2][:6].sum() >= 12  # ends of both kinds were among it


def test_first_episodes_can_end_at_different_times() -> None:
    player = walkers(range(200), max_episode_steps=10, randomize_initial_episode_length=True)
    assert np.bincount(np.asarray(player.state.episode_length), minlength=10).min() > 5
    assert np.asarray(player.state.is_whole).sum() == (np.asarray(player.state.episode_length) == 0).sum()


class _State(NamedTuple):
    data: Any
    obs: Any
    reward: Any
    done: Any
    metrics: Any


class Counter:
    """An env with Brax's interface: counts its steps, and is done at the third."""

    def reset(self, key: Any) -> Any:
        zero = jnp.zeros(())
        return _State({"count": zero}, {"state": zero[None]}, zero, zero, {"seen": zero, "table": jnp.zeros(2)})

    def step(self, state: Any, action: Any) -> Any:
        count = state.data["count"] + 1.0
        state.metrics.update(seen=count)  # in place, as Brax's own envs do
        done = (count >= 3).astype(jnp.float32)
        return _State({"count": count}, {"state": count[None]}, count + action[0], done, state.metrics)


def test_a_repeated_action_is_paid_for_each_step_up_to_the_end() -> None:
    guest = BraxStyleGuest(Counter(), 2)
    assert guest.metric_terms == ("seen",)  # what is no single number is none
    task = JaxGuestTask(guest, ActionSpace("continuous", 1), 10, metric_terms=guest.metric_terms)
    player = Player(JaxGuestEnv(task, JaxGuestConfig(), seed=1, dtype=jnp.float32), range(1))
    first = player.step(5.0)  # clipped to 1: rewards of 1 + 1 and 2 + 1
    assert (first.terms.tolist(), first.done.tolist()) == ([[5.0, 2.0]], [False])
    second = player.step(-0.5)  # done after one of two steps, in which the count is 3
    assert (second.terms.tolist(), second.terminated.tolist()) == ([[2.5, 3.0]], [True])
    assert second.final_observations["actor"].tolist() == [[3.0]]
    assert player.positions == [0.0]


def test_groups_of_observations_of_a_dict() -> None:
    both = observation_groups({"state": jnp.ones((2, 2)), "privileged_state": jnp.zeros(3)})
    assert (both["actor"].tolist(), both["critic"].tolist()) == ([1.0] * 4, [0.0] * 3)
    neither = observation_groups({"b": jnp.zeros(1), "a": jnp.ones(2, jnp.int32)})
    assert neither["actor"].tolist() == neither["critic"].tolist() == [1.0, 1.0, 0.0]
    assert neither["actor"].dtype == jnp.float32


def test_what_a_library_comes_to_grief_over_is_said_in_a_line() -> None:
    class Old(Walker):
        def step(self, key: Any, state: Any, action: Any) -> GuestStep:
            raise TypeError("clip() got an unexpected keyword argument\nand more")

    class Fickle(Walker):
        def step(self, key: Any, state: Any, action: Any) -> GuestStep:
            step = super().step(key, state, action)
            return step._replace(state={**step.state, "age": step.state["age"] + 0.5})

    for guest, words in (
        (Old(), "fails with the JAX that is here: TypeError: clip\\(\\) got an unexpected keyword argument; use"),
        (Fickle(), "the env's step gives age as float32\\[\\], and its reset as int32\\[\\]"),
    ):
        task = JaxGuestTask(guest, ActionSpace("continuous", 1), 10, metric_terms=("luck",))
        player = Player(JaxGuestEnv(task, JaxGuestConfig(), seed=1, dtype=jnp.float32), range(1))
        with pytest.raises(UsageError, match=words):
            player.step(0.0)
