"""Our envs in Gymnasium's interfaces: its own checkers, its reference for vector envs, seeds, ends of episodes."""

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from tests.unit.learner_fixtures import Line, toy_env

gymnasium = pytest.importorskip("gymnasium", reason="needs Gymnasium: pip install 'lockstep-rl[gymnasium]'")

from gymnasium.utils.env_checker import check_env  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from gymnasium.wrappers import vector as wrappers  # noqa: E402

from lockstep.adapters.gymnasium.single import LockstepEnv  # noqa: E402
from lockstep.adapters.gymnasium.vector import LockstepVectorEnv  # noqa: E402

TASKS = ("cartpole_classic", "cartpole_balance", "cartpole_swingup", "quadruped_velocity_flat")
FEW_MODELS = {"randomization": {"num_models": 2}}


def settings_of(task: str) -> dict[str, Any]:
    return FEW_MODELS if task == "quadruped_velocity_flat" else {}


def line(num_envs: int, **settings: Any) -> LockstepVectorEnv:
    mode = settings.pop("autoreset_mode", "SameStep")
    observations = settings.pop("observations", "actor")
    return LockstepVectorEnv(
        toy_env(Line(), num_envs, **settings), seed=1, autoreset_mode=mode, observations=observations
    )


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return np.array_equal(one, other)


# --- what Gymnasium checks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("observations", ["actor", "all"])
@pytest.mark.parametrize("task", TASKS)
def test_gymnasium_finds_nothing_wrong_with_an_env(task: str, observations: str) -> None:
    lockstep.register_gymnasium_envs()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        env = gymnasium.make(f"lockstep/{task}-v0", observations=observations, **settings_of(task))
        check_env(env.unwrapped)
        for _ in range(3):  # through the wrapper that checks every step
            env.reset()
            env.step(env.action_space.sample())
        env.close()
        env.close()
    messages = {str(each.message) for each in said if "lockstep" not in str(each.filename)}
    # No task bounds its observations, and the quadruped takes actions beyond 1.
    expected = "infinity|symmetric and normalized" if task == "quadruped_velocity_flat" else "infinity"
    assert [message for message in messages if not re.search(expected, message)] == []


@pytest.mark.filterwarnings("ignore:.*infinity")  # no task bounds its observations
def test_gymnasium_finds_nothing_wrong_with_discrete_actions() -> None:
    env = lockstep.make_gymnasium_env("cartpole_classic", action_kind="discrete", seed=None)
    assert env.action_space == gymnasium.spaces.Discrete(2)
    check_env(env, skip_render_check=True)
    envs = lockstep.make_gymnasium_vector_env("cartpole_classic", 3, action_kind="discrete", device="cpu")
    assert envs.action_space == gymnasium.spaces.MultiDiscrete([2, 2, 2])
    before, _ = envs.reset()
    after, *_ = envs.step(np.array([0, 1, 1]))
    assert ((after - before)[:, 2] > 0).tolist() == [False, True, True]  # the cart's velocity


@pytest.mark.parametrize("task", TASKS)
def test_what_a_vector_env_gives_is_within_its_spaces(task: str) -> None:
    lockstep.register_gymnasium_envs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # make_vec warns of missing metadata
        envs = gymnasium.make_vec(f"lockstep/{task}-v0", 3, max_episode_steps=4, **settings_of(task))
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.spec.id == f"lockstep/{task}-v0"
    assert envs.action_space.shape == (3, *envs.single_action_space.shape)
    observations, _ = envs.reset(seed=4)
    for number in range(1, 9):
        assert observations in envs.observation_space
        observations, rewards, terminated, truncated, infos = envs.step(0.05 * envs.action_space.sample())
        assert [array.shape for array in (rewards, terminated, truncated)] == [(3,)] * 3
        assert [array.dtype for array in (rewards, terminated, truncated)] == [np.float32, np.bool_, np.bool_]
        assert sum(infos["reward_terms"][name] for name in envs.env.task.reward_terms) == pytest.approx(
            rewards, abs=1e-6
        )
        assert truncated.all() == (number % 4 == 0)
        for row in np.flatnonzero(truncated):
            assert infos["final_obs"][row] in envs.single_observation_space
    envs.close()
    envs.close()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_vector_envs_step_as_gymnasiums_own(mode: AutoresetMode) -> None:
    """The reference steps three of our single envs one by one; the toy always starts at 0."""
    own = line(3, max_episode_steps=5, autoreset_mode=mode)
    reference = SyncVectorEnv([lambda: LockstepEnv(toy_env(Line(), 1, max_episode_steps=5))] * 3, autoreset_mode=mode)
    assert own.single_observation_space == reference.single_observation_space
    assert own.action_space == reference.action_space
    assert own.metadata["autoreset_mode"] is mode
    generator = np.random.default_rng(2)
    assert equal(own.reset(seed=1)[0], reference.reset(seed=1)[0])
    num_ends = {"terminated": 0, "truncated": 0}
    for _ in range(40):
        actions = generator.uniform(-1, 3, (3, 1)).astype(np.float32)
        found: Any = own.step(actions)
        expected: Any = reference.step(actions)
        assert equal(found[:4], expected[:4])
        num_ends["terminated"] += int(found[2].sum())
        num_ends["truncated"] += int(found[3].sum())
        ended = found[2] | found[3]
        infos, wanted = found[4], expected[4]
        assert infos.keys() >= wanted.keys()
        assert ("final_obs" in infos) == ("final_obs" in wanted)
        for name in ("_final_obs", "_final_info"):
            assert equal(infos.get(name), wanted.get(name))
        if "final_obs" in wanted:
            assert all(equal(*pair) for pair in zip(infos["final_obs"], wanted["final_obs"], strict=True))
            assert equal(
                infos["final_info"]["reward_terms"]["progress"][found[2] | found[3]], actions[found[2] | found[3], 0]
            )
        if "reward_terms" in wanted:
            rows = wanted["_reward_terms"]
            for term in ("progress", "alive"):
                assert equal(infos["reward_terms"][term][rows], wanted["reward_terms"][term][rows])
        if mode is AutoresetMode.DISABLED and ended.any():
            assert equal(own.reset(options={"reset_mask": ended})[0], reference.reset(options={"reset_mask": ended})[0])
    assert num_ends["terminated"] > 5
    assert num_ends["truncated"] > 1


# --- against our own envs ------------------------------------------------------------------------------------------


def test_a_long_rollout_is_that_of_the_envs_themselves() -> None:
    settings: dict[str, Any] = {"seed": 3, "device": "cpu", "max_episode_steps": 30}
    envs = lockstep.make_gymnasium_vector_env("cartpole_classic", 32, **settings)
    own = lockstep.make_env("cartpole_classic", 32, randomize_initial_episode_length=False, **settings)
    assert equal(envs.reset()[0], own.observations["actor"].numpy())
    generator = np.random.default_rng(0)
    num_ends = {"terminated": 0, "truncated": 0}
    for _ in range(120):
        actions = generator.uniform(-1, 1, (32, 1)).astype(np.float32)
        observations, rewards, terminated, truncated, infos = envs.step(actions)
        transition = own.step(torch.as_tensor(actions))
        assert equal(observations, transition.observations["actor"].numpy())
        assert equal(rewards, transition.reward.numpy())
        assert equal(terminated, transition.terminated.numpy())
        assert equal(truncated, transition.truncated.numpy())
        for row in np.flatnonzero(terminated | truncated):
            assert equal(infos["final_obs"][row], transition.final_observations["actor"][row].numpy())
        num_ends["terminated"] += int(terminated.sum())
        num_ends["truncated"] += int(truncated.sum())
    assert min(num_ends.values()) > 20


def test_what_only_a_critic_may_see_can_be_had() -> None:
    envs = line(2, max_episode_steps=2, observations="all")
    space: Any = envs.observation_space
    assert space["critic"].shape == (2, 4)
    envs.reset()
    envs.step(np.array([[1.0], [2.0]]))
    observations, _, terminated, truncated, infos = envs.step(np.array([[0.5], [2.0]]))
    assert (terminated.tolist(), truncated.tolist()) == ([False, True], [True, False])
    # Position, last action and age: of the step itself, and of the new episode.
    assert infos["final_obs"][0]["critic"][:3].tolist() == [1.5, 0.5, 2.0]
    assert infos["final_obs"][1]["critic"][:3].tolist() == [4.0, 2.0, 2.0]
    assert observations["critic"][:, :3].tolist() == [[0.0, 0.0, 0.0]] * 2
    assert equal(envs.state(), observations["critic"])


def test_handed_out_arrays_are_the_callers() -> None:
    envs = lockstep.make_gymnasium_vector_env("cartpole_balance", 4, device="cpu")
    other = lockstep.make_gymnasium_vector_env("cartpole_balance", 4, device="cpu")
    for each in (envs, other):
        observations, _ = each.reset(seed=2)
    actions = np.full((4, 1), 0.3, dtype=np.float32)
    for _ in range(5):
        results = envs.step(actions.copy())
        assert equal(results[0], other.step(actions)[0])
        for array in (observations, *results[:4]):
            array[:] = 7  # nothing of it reaches the envs
        observations = results[0]


# --- seeds and resets ----------------------------------------------------------------------------------------------


def starts(envs: Any, *seeds: int | None) -> list[Any]:
    return [envs.reset(seed=seed)[0] for seed in seeds]


@pytest.mark.parametrize("task", ["cartpole_balance", "quadruped_velocity_flat"])
def test_a_seed_means_the_same_episodes_in_every_env(task: str) -> None:
    one, other = (
        lockstep.make_gymnasium_vector_env(task, 3, seed=None, device="cpu", max_episode_steps=3, **settings_of(task))
        for _ in range(2)
    )
    unseeded = [starts(envs, None)[0] for envs in (one, other)]
    assert not equal(*unseeded)
    rollouts = []
    for envs in (one, other):
        envs.action_space.seed(0)
        begun = starts(envs, 5, 5, None, 6)
        assert equal(begun[0], begun[1])
        assert not equal(begun[1], begun[2])  # without a seed, it goes on
        assert not equal(begun[1], begun[3])
        rollouts.append((begun, [envs.step(envs.action_space.sample())[:4] for _ in range(8)]))
    for pair in zip(rollouts[0][1], rollouts[1][1], strict=True):
        assert equal(*pair)
    assert all(map(equal, rollouts[0][0], rollouts[1][0]))


def test_an_env_made_with_a_seed_needs_none_at_reset() -> None:
    envs = [lockstep.make_gymnasium_env("cartpole_classic", seed=seed) for seed in (1, 1, 2)]
    first, again, other = (starts(env, None, None) for env in envs)
    assert equal(first[0], again[0])
    assert equal(first[1], again[1])
    assert not equal(first[0], other[0])
    assert not equal(first[0], first[1])


def test_only_the_envs_of_a_mask_are_reset() -> None:
    envs = LockstepVectorEnv(toy_env(Line(spread=1.0), 3), seed=1)
    before, _ = envs.reset()
    moved, *_ = envs.step(np.ones((3, 1)))
    options = {"reset_mask": np.array([False, True, False])}
    after, _ = envs.reset(options=options)
    assert equal(after[[0, 2]], moved[[0, 2]])
    assert 0 <= after[1, 0] < 1
    assert after[1, 0] != before[1, 0]
    assert "reset_mask" in options  # wrappers look for it
    again, _ = envs.reset(options=options)
    assert again[1, 0] != after[1, 0]
    assert equal(again[[0, 2]], moved[[0, 2]])
    assert envs.env.episode_length.tolist() == [1, 0, 1]


def test_an_episode_that_was_broken_off_counts_for_nothing() -> None:
    env = toy_env(Line(), 2)
    env.step(torch.ones((2, 1), dtype=torch.float64))
    env.restart(torch.tensor([True, False]))
    env.step(torch.full((2, 1), 3.0, dtype=torch.float64))
    # The first env made 3 in one step, the second 1 and 3 in two.
    assert env.summarise(env.episodes.take().tolist()) == {
        "mean_return": (3.0 + 1.0 + 4.0 + 2.0) / 2,
        "mean_episode_length": 1.5,
        "num_episodes": 2,
        "reward/progress": 3.5,
        "reward/alive": 1.5,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seed": [1, 2, 3]}, "one whole number"),
        ({"seed": 1, "options": {"reset_mask": np.array([True, False, True])}}, "for all envs"),
        ({"options": {"reset_mask": np.array([True, False])}}, r"\(3,\) booleans"),
        ({"options": {"reset_mask": np.zeros(3, dtype=bool)}}, "one of them True"),
        ({"options": {"reset_mask": [True, True, True]}}, "numpy array"),
    ],
)
def test_what_reset_refuses(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        line(3).reset(**arguments)


def test_actions_of_another_shape_and_steps_after_the_end_are_refused() -> None:
    envs = line(2, autoreset_mode="Disabled")
    envs.reset()
    with pytest.raises(ValueError, match=r"shape \(2,\), not \(2, 1\)"):
        envs.step(np.zeros(2))
    envs.step(np.array([[3.0], [0.0]]))
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"\[0\]"):
        envs.step(np.zeros((2, 1)))
    env = LockstepEnv(toy_env(Line(), 1), seed=1)
    env.reset()
    assert env.step(np.array([3.0]))[0].tolist() == [3.0]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.array([0.0]))
    assert env.reset()[0].tolist() == [0.0]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_no_step_before_a_reset_and_nothing_after_the_end(mode: AutoresetMode) -> None:
    cases: list[tuple[Any, Any]] = [
        (line(2, autoreset_mode=mode), np.zeros((2, 1))),
        (LockstepEnv(toy_env(Line(), 1), seed=1), np.zeros(1)),
    ]
    for env, action in cases:
        with pytest.raises(gymnasium.error.ResetNeeded, match="before the first step"):
            env.step(action)
        env.reset()
        env.step(action)
        env.close()
        env.close()
        for call in (lambda env=env, action=action: env.step(action), env.reset):
            with pytest.raises(gymnasium.error.ClosedEnvironmentError):
                call()


# --- wrappers and libraries ----------------------------------------------------------------------------------------


def test_gymnasiums_wrappers_for_vector_envs_work() -> None:
    observations: Any
    infos: Any
    envs = wrappers.RecordEpisodeStatistics(line(2, max_episode_steps=3, autoreset_mode="NextStep"))
    envs.reset(seed=1)
    for _ in range(8):  # two episodes of three steps each, and the steps in which the next ones start
        envs.step(np.array([[0.5], [1.0]]))
    assert list(envs.length_queue) == [3, 3, 3, 3]
    # The second reaches 3 in its third step, which is also its last.
    assert list(envs.return_queue) == [4.5, 6.0, 4.5, 6.0]
    normalised = wrappers.NormalizeObservation(line(64, autoreset_mode="NextStep"))
    normalised.reset(seed=1)
    generator = np.random.default_rng(0)
    for _ in range(30):
        observations, *_ = normalised.step(generator.standard_normal((64, 1)))
    assert abs(observations.mean()) < 1
    assert 0.5 < observations.std() < 2
    in_torch = wrappers.NumpyToTorch(line(2, autoreset_mode="NextStep"))
    in_torch.reset()
    assert in_torch.step(torch.tensor([[0.5], [1.0]]))[0].tolist() == [[0.5], [1.0]]
    listed = wrappers.DictInfoToList(line(2))
    listed.reset()
    infos = listed.step(np.array([[0.5], [3.0]]))[4]
    assert infos[0] == {"reward_terms": {"progress": 0.5, "alive": 1.0}}
    assert infos[1]["final_obs"].tolist() == [3.0]
    flat = wrappers.FlattenObservation(line(2, observations="all", autoreset_mode="NextStep"))
    flat.reset()
    # What the actor sees, then position, last action and age for the critic.
    assert flat.step(np.array([[0.5], [3.0]]))[0][:, :4].tolist() == [[0.5, 0.5, 0.5, 1.0], [3.0, 3.0, 3.0, 1.0]]


def test_skrl_takes_a_vector_env() -> None:
    skrl = pytest.importorskip("skrl.envs.wrappers.torch", reason="needs skrl: pip install 'lockstep-rl[skrl]'")
    env = skrl.wrap_env(line(2), verbose=False)
    assert (env.num_envs, env.device) == (2, torch.device("cpu"))
    assert [space.shape for space in (env.observation_space, env.action_space, env.state_space)] == [(1,), (1,), (4,)]
    env.reset()
    observations, rewards, *_ = env.step(torch.tensor([[0.5], [1.0]]))
    assert observations.tolist() == [[0.5], [1.0]]
    assert rewards.tolist() == [[1.5], [2.0]]
    assert env.state()[:, :3].tolist() == [[0.5, 0.5, 1.0], [1.0, 1.0, 1.0]]
