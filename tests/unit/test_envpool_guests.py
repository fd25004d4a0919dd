"""EnvPool's envs in ours: no step is dropped, ends are told apart, and the threads are this rank's."""

from typing import Any

import envpool
import numpy as np
import pytest
import torch

from lockstep.adapters.envpool.guest import EnvPoolEnvs
from lockstep.core.errors import UsageError
from lockstep.envs.guest_env import GuestEnv
from lockstep.recipes.catalog import make_task
from lockstep.session.make_config import make_config
from lockstep.session.make_env import build_env, make_env

CARTPOLE = "envpool/CartPole-v1"


def make(task: str, num_envs: int, **settings: Any) -> GuestEnv:
    env = make_env(task, num_envs, device="cpu", **settings)
    assert isinstance(env, GuestEnv)
    return env


def test_episodes_are_those_of_the_pool_itself_without_the_steps_that_it_drops() -> None:
    env = make(CARTPOLE, 3)
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=env._seeds(np.arange(3)).tolist(), num_threads=1)
    expected, _ = pool.reset()
    assert torch.equal(env.observations["actor"], torch.from_numpy(expected))
    actions = np.array([0, 1, 1])
    ends = 0
    for _ in range(40):
        transition = env.step(torch.from_numpy(actions))
        expected, reward, terminated, *_ = pool.step(actions)
        assert torch.equal(transition.final_observations["actor"], torch.from_numpy(expected))
        assert torch.equal(transition.reward, torch.from_numpy(reward))
        assert torch.equal(transition.terminated, torch.from_numpy(terminated))
        rows = terminated.nonzero()[0]
        if rows.size:  # the pool would begin the next episode with a step that ignores its action
            ends += rows.size
            expected[rows], _ = pool.reset(rows.astype(np.int32))
        assert torch.equal(transition.observations["critic"], torch.from_numpy(expected))
    assert ends >= 9
    assert env.episodes.take()[-1] == ends


def test_the_time_limit_cuts_and_an_end_at_the_limit_is_an_end() -> None:
    free = make(CARTPOLE, 8)
    one_way = torch.ones(8, dtype=torch.int64)
    lengths = torch.zeros(8)
    running = torch.ones(8, dtype=torch.bool)
    while running.any():
        lengths += running
        running &= ~free.step(one_way).done
    limit = int(lengths.max())
    limited = make(CARTPOLE, 8, max_episode_steps=limit)
    for _ in range(limit):
        transition = limited.step(one_way)
    assert torch.equal(transition.terminated, lengths == limit)
    short = make(CARTPOLE, 8, max_episode_steps=3)
    for _ in range(3):
        transition = short.step(one_way)
    assert transition.truncated.all()
    assert not transition.terminated.any()
    assert not torch.equal(transition.final_observations["actor"], transition.observations["actor"])


def test_an_evaluation_meets_the_same_episodes_and_a_rank_its_own() -> None:
    config = make_config(CARTPOLE, num_envs=4, device="cpu", agent={"num_mini_batches": 1})
    together, last = build_env(config), build_env(config, num_envs=1, first_env_id=3)
    action = torch.zeros(4, dtype=torch.int64)
    firsts = []
    for _ in range(2):
        together.reset()
        last.reset()
        seen = [together.observations["actor"]]
        for _ in range(15):
            seen.append(together.step(action).observations["actor"])
            assert torch.equal(last.step(action[3:]).observations["actor"], seen[-1][3:])
        firsts.append(torch.cat(seen))
    assert torch.equal(*firsts)


def test_a_new_episode_is_given_to_the_env_that_asked_for_it() -> None:
    config = make_config(CARTPOLE, env={"num_physics_threads": 2}).env
    envs = EnvPoolEnvs("CartPole-v1", config, num_envs=6, num_threads=2)  # type: ignore[arg-type]
    twin = EnvPoolEnvs("CartPole-v1", config, num_envs=6, num_threads=1)  # type: ignore[arg-type]
    seeds = np.arange(6)
    envs.start(seeds)
    twin.start(seeds)
    one_by_one = np.concatenate([twin.restart(np.array([row]), seeds[:1]) for row in (4, 0, 3)])
    assert np.array_equal(envs.restart(np.array([4, 0, 3]), seeds[:3]), one_by_one)


def test_continuous_actions_are_laid_over_the_bounds() -> None:
    env = make("envpool/Pendulum-v1", 2)  # whose torque goes from -2 to 2
    pool = envpool.make_gymnasium("Pendulum-v1", num_envs=2, seed=env._seeds(np.arange(2)).tolist(), num_threads=1)
    pool.reset()
    expected, *_ = pool.step(np.array([[1.0], [-2.0]], dtype=np.float32))
    transition = env.step(torch.tensor([[0.5], [-3.0]]))
    assert torch.equal(transition.final_observations["actor"], torch.from_numpy(expected))


def test_a_choice_that_is_seen_becomes_one_number_for_each() -> None:
    env = make("envpool/FrozenLake-v1", 2)
    assert env.observations["actor"].tolist() == [[1.0] + 15 * [0.0]] * 2


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"seed": 3}, "env.kwargs.seed is not EnvPool's to be told here; give --seed S"),
        ({"colour": "red"}, "EnvPool can't make env 'CartPole-v1': "),
    ],
)
def test_wrong_keyword_arguments_are_named(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as error:
        make_task(make_config(CARTPOLE, env={"kwargs": kwargs}))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_its_mujoco_envs_keep_their_time_limit_and_size() -> None:
    config = make_config("envpool/HalfCheetah-v4")
    task = make_task(config)
    assert config.env.max_episode_steps == 1000
    assert (task.action_space.kind, task.action_space.size, task.num_observations["critic"]) == ("continuous", 6, 17)
