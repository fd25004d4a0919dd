"""Envs in JAX: resets, time limits, diverged envs, sums over episodes, and padding; worked out by hand."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from lockstep.core.types import Array, InitialState, Namespace, Observations, State
from tests.unit.learner_fixtures import Line
from tests.unit.watched_fixtures import watched

jax = pytest.importorskip("jax")
jnp = jax.numpy

from tests.unit.jax_env_fixtures import Player, toy_jax_env  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

NAN = math.nan


@functools.cache
def line_env(max_episode_steps: int = 100) -> Any:
    return toy_jax_env(Line(), max_episode_steps=max_episode_steps)


def line(num_envs: int, **arguments: int) -> Player:
    return Player(line_env(**arguments), range(num_envs))


# --- episodes ------------------------------------------------------------------------------------------------------


def test_rewards_and_observations_of_steps_by_hand() -> None:
    player = line(2)
    assert player.positions == [0.0, 0.0]
    transition = player.step(1.0, -2.0)
    assert transition.reward.tolist() == [2.0, -1.0]
    assert transition.terms.tolist() == [[1.0, 1.0], [-2.0, 1.0]]
    assert transition.done.tolist() == [False, False]
    assert player.positions == [1.0, -2.0]
    player.step(1.0, 1.0)
    # The critic sees position, last action, age and noise.
    assert player.state.observations["critic"][:, :3].tolist() == [[2.0, 1.0, 2.0], [-1.0, 1.0, 2.0]]
    assert player.state.episode_length.tolist() == [2, 2]


def test_a_failed_episode_ends_and_the_next_begins() -> None:
    player = line(2)
    player.step(2.0, 0.5)
    transition = player.step(1.5, 0.5)
    assert transition.terminated.tolist() == [True, False]
    assert transition.truncated.tolist() == [False, False]
    # The step's own observation is kept beside that of the new episode, which has forgotten action and age.
    assert transition.final_observations["actor"].flatten().tolist() == [3.5, 1.0]
    assert transition.final_observations["critic"][:, :3].tolist() == [[3.5, 1.5, 2.0], [1.0, 0.5, 2.0]]
    assert transition.observations["actor"].flatten().tolist() == [0.0, 1.0]
    assert transition.observations["critic"][:, :3].tolist() == [[0.0, 0.0, 0.0], [1.0, 0.5, 2.0]]
    player.step(1.0, 1.0)
    assert player.positions == [1.0, 2.0]
    assert player.state.episode_length.tolist() == [1, 3]


def test_the_time_limit_truncates() -> None:
    player = line(3, max_episode_steps=3)
    player.step(0.0, 0.0, 0.0)
    player.step(0.0, 3.0, 0.0)  # the second fails early and begins anew
    transition = player.step(0.5, 0.5, 3.0)  # the third fails in the very step of its limit: that is a failure
    assert transition.truncated.tolist() == [True, False, False]
    assert transition.terminated.tolist() == [False, False, True]
    assert transition.final_observations["actor"].flatten().tolist() == [0.5, 0.5, 3.0]
    assert player.positions == [0.0, 0.5, 0.0]
    assert player.step(0.0, 0.0, 0.0).done.tolist() == [False] * 3
    assert player.step(0.0, 0.0, 0.0).truncated.tolist() == [False, True, False]


def test_episodes_are_summed_by_hand() -> None:
    player = line(2, max_episode_steps=3)
    finished = [
        player.step(first, second).finished.tolist()
        for first, second in ((1.0, 4.0), (1.0, 0.5), (0.5, 0.5), (3.0, 0.5), (0.0, 0.0))
    ]
    # Each: progress, alive, length, number. First env: 1 + 1 + 0.5 in 3 steps, then 3 in 1; the second: 4, then 1.5.
    assert finished == [[4.0, 1.0, 1.0, 1.0], [0.0] * 4, [2.5, 3.0, 3.0, 1.0], [4.5, 4.0, 4.0, 2.0], [0.0] * 4]
    assert player.state.running.tolist() == [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]


def test_metrics_are_no_part_of_the_return() -> None:
    with watched(Line):
        player = Player(toy_jax_env(Line(), max_episode_steps=2), range(1))
        finished = [player.step(action).finished for action in (1.0, 0.5)]
        nothing, found = (
            {name: float(value) for name, value in player.env.summarise(sums).items()} for sums in finished
        )
    # In two steps the point is at 1 and at 1.5.
    assert (found["mean_return"], found["metric/distance"], found["metric/is_step"]) == (3.5, 1.25, 1.0)
    assert (found["mean_episode_length"], found["num_episodes"], found["reward/alive"]) == (2.0, 1, 2.0)
    assert nothing.pop("num_episodes") == 0
    assert nothing.keys() == found.keys() - {"num_episodes"}
    assert np.isnan(list(nothing.values())).all()


def test_first_episodes_end_at_different_times_and_count_only_if_whole() -> None:
    player = Player(toy_jax_env(Line(), max_episode_steps=10, randomize=True), range(1000))
    lengths = np.asarray(player.state.episode_length)
    assert np.bincount(lengths, minlength=10).min() > 50  # about 100 each
    assert np.bincount(lengths).shape == (10,)
    assert player.state.is_whole.tolist() == (lengths == 0).tolist()
    ends, finished = np.zeros(1000, dtype=int), np.zeros(4)
    for number in range(1, 11):
        transition = player.step(*[0.0] * 1000)
        ends[np.asarray(transition.done)] = number
        finished += np.asarray(transition.finished)
    assert ends.tolist() == (10 - lengths).tolist()
    # Only those that began at 0 were whole: ten steps each.
    num_whole = int((lengths == 0).sum())
    assert finished.tolist() == [0.0, 10.0 * num_whole, 10.0 * num_whole, num_whole]
    assert player.state.is_whole.all()


def test_every_reset_draws_anew_and_seeds_and_streams_differ() -> None:
    starts = []
    for arguments in ({"seed": 1}, {"seed": 2}, {"seed": 1, "streams": "evaluation"}):
        player = Player(toy_jax_env(Line(spread=1.0), **arguments), range(8))
        starts.append(player.positions)
    for _ in range(3):
        player.step(*[3.0] * 8)
        starts.append(player.positions)
    assert len({value for row in starts for value in row}) == 6 * 8
    assert all(0 <= value < 1 for row in starts for value in row)


# --- envs whose physics fail, and padding --------------------------------------------------------------------------


def test_a_diverged_env_is_reset_and_counted_and_infects_nobody() -> None:
    player, healthy = line(3), line(3)
    player.step(1.0, 1.0, 1.0)
    healthy.step(1.0, 1.0, 1.0)
    transition, other = player.step(0.5, NAN, 0.5), healthy.step(0.5, 0.5, 0.5)
    assert transition.terminated.tolist() == [False, True, False]
    assert transition.truncated.tolist() == [False, False, False]
    # No reward at all in the step that failed, not even that for being alive.
    assert transition.reward.tolist() == [1.5, 0.0, 1.5]
    assert transition.terms[1].tolist() == [0.0, 0.0]
    assert (int(transition.num_diverged), int(other.num_diverged)) == (1, 0)
    # Its failed episode counts with what it had until then: 1 in the first step, and 2 steps.
    assert transition.finished.tolist() == [1.0, 1.0, 2.0, 1.0]
    for name, array in transition.observations.items():
        assert np.isfinite(array).all()
        assert array[::2].tolist() == other.observations[name][::2].tolist()
    assert player.positions == [1.5, 0.0, 1.5]
    assert player.step(0.0, 3.0, 0.0).finished.tolist() == [3.0, 1.0, 1.0, 1.0]


def test_padding_counts_nowhere_and_changes_nothing() -> None:
    env = toy_jax_env(Line(spread=1.0), max_episode_steps=3, randomize=True)
    everyone, some, rest = (Player(env, ids) for ids in ([4, 6, 5, 7], [4, -1, 5, -1], [-1, 6, -1, 7]))
    num_finished = np.zeros(2)
    for actions in ([0.0, NAN, 0.0, 1.0], [2.9, 4.0, 0.0, NAN], [0.5, 0.0, 0.0, 4.0], [NAN] * 4, [0.0, 0.5, 0.5, 3.0]):
        transitions = [player.step(*actions) for player in (everyone, some, rest)]
        num_diverged = [int(transition.num_diverged) for transition in transitions]
        assert num_diverged == [np.isnan(actions).sum(), np.isnan(actions[::2]).sum(), np.isnan(actions[1::2]).sum()]
        sums = [np.asarray(transition.finished) for transition in transitions]
        np.testing.assert_allclose(sums[1] + sums[2], sums[0], rtol=0, atol=1e-12)
        num_finished += (sums[1][-1], sums[2][-1])
        assert some.positions[::2] + rest.positions[1::2] == everyone.positions[::2] + everyone.positions[1::2]
    assert (num_finished > 2).all()


# --- what is handed out, and what is refused -----------------------------------------------------------------------


class Careless(Line):
    """Computes with numpy's doubles, which are strong in JAX, and with an integer variable."""

    def reset(self, xp: Namespace, noise: Array) -> InitialState:
        start = noise * np.float64(0.5)
        return InitialState(start, xp.zeros_like(start), {"age": xp.zeros(start.shape, dtype=xp.int32)})

    def control(self, xp: Namespace, state: State, action: Array) -> Array:
        return action * np.float64(1.0)

    def dynamics(self, xp: Namespace, qpos: Array, qvel: Array, ctrl: Array) -> tuple[Array, Array]:
        return qpos + ctrl * np.float64(1.0), qvel

    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        return state._replace(qpos=state.qpos * np.float64(1.0), variables={"age": state.variables["age"] + 1})

    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        age = xp.astype(state.variables["age"], xp.float64)
        return {"actor": state.qpos, "critic": xp.concat((state.qpos, state.ctrl, age, noise), axis=1)}

    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        return {"alive": state.ctrl[:, 0] * 0 + np.float64(1.0), "progress": state.ctrl[:, 0]}


def described(tree: Any) -> Mapping[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype), leaf.weak_type) for path, leaf in leaves}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_leaf_changes_its_dtype_and_sums_alone_are_double(dtype: str) -> None:
    player = Player(toy_jax_env(Careless(), dtype=dtype, max_episode_steps=3), range(4))
    start = described(player.state)
    for _ in range(4):
        transition = player.step(*[0.5] * 4)
        assert described(player.state) == start
    other_than_dtype = {".env_ids", ".episode_length", ".is_whole", ".state.variables['age']"}
    other_than_dtype |= {".running"} if dtype == "float32" else set()
    assert {name for name, leaf in start.items() if leaf[1] != dtype} == other_than_dtype
    assert [start[name][1] for name in (".running", ".episode_length")] == ["float64", "int32"]
    floats = (transition.reward, transition.terms, *transition.final_observations.values())
    assert {str(array.dtype) for array in floats} == {dtype}
    assert [str(array.dtype) for array in (transition.finished, transition.num_diverged)] == ["float64", "int32"]
    # Terms come in the order that the task declares, not in that of its dictionary.
    assert transition.terms.tolist() == [[0.5, 1.0]] * 4


class Mislabelled(Line):
    """Says of its observations what is not so."""

    num_observations = {"actor": 2, "critic": 4}  # noqa: RUF012


def test_wrong_shapes_and_missing_float64_are_refused() -> None:
    ids = jnp.arange(4, dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"'actor' of shape \(4, 1\), not \(4, 2\)"):
        jax.eval_shape(toy_jax_env(Mislabelled()).reset, ids)
    env = line_env()
    noise = jax.eval_shape(lambda ids: jax.tree.map(lambda table: table[0], env.noise(ids, 1, 1)), ids)
    with pytest.raises(ValueError, match=r"actions have shape \(4,\), not \(4, 1\)"):
        jax.eval_shape(env.step, jax.eval_shape(env.reset, ids), jnp.zeros(4), noise)
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"enter jax.enable_x64\(True\)"):
        jax.eval_shape(toy_jax_env(Line(), dtype="float32").reset, ids)
