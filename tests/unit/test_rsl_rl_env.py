"""Our envs as RSL-RL's VecEnv: what a step returns, episode lengths that it sets, and its own runner on them."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.core.errors import UsageError
from tests.unit.learner_fixtures import Line, Recall, toy_env
from tests.unit.watched_fixtures import watched

pytest.importorskip("rsl_rl", reason="needs RSL-RL: pip install 'lockstep-rl[rsl-rl]'")

from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from rsl_rl.utils.log_writer import LogWriter

from lockstep.adapters.rsl_rl.env import RslRlEnv


def step(env: RslRlEnv, *actions: float) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
    return env.step(torch.tensor(actions).unsqueeze(1))


def test_what_a_step_returns_by_hand() -> None:
    env = RslRlEnv(toy_env(Line(), 3, max_episode_steps=2))
    assert isinstance(env, VecEnv)
    assert (env.num_envs, env.num_actions, env.max_episode_length) == (3, 1, 2)
    assert (env.device, env.step_dt) == (torch.device("cpu"), 1.0)
    assert env.cfg["max_episode_steps"] == 2
    observations = env.get_observations()
    assert {name: tuple(group.shape) for name, group in observations.items()} == {"actor": (3, 1), "critic": (3, 4)}
    assert observations["actor"].dtype == torch.float32
    _, rewards, dones, extras = step(env, 1.0, 2.0, 3.0)
    assert (rewards.tolist(), dones.tolist()) == ([2.0, 3.0, 4.0], [0, 0, 1])
    assert extras["time_outs"].tolist() == [False, False, False]
    # Sums over each episode that has ended.
    assert {name: values.tolist() for name, values in extras["log"].items()} == {
        "reward/progress": [3.0],
        "reward/alive": [1.0],
    }
    observations, rewards, dones, extras = step(env, 0.5, 2.0, 0.5)
    assert dones.tolist() == [1, 1, 0]
    assert extras["time_outs"].tolist() == [True, False, False]  # the second failed in the step of its limit
    assert extras["log"]["reward/progress"].tolist() == [1.5, 4.0]
    assert extras["log"]["reward/alive"].tolist() == [2.0, 2.0]
    assert observations["actor"].flatten().tolist() == [0.0, 0.0, 0.5]
    assert extras["final_observations"]["actor"].flatten().tolist() == [1.5, 4.0, 0.5]
    assert extras["final_observations"]["critic"][:, 2].tolist() == [2.0, 2.0, 1.0]  # ages
    assert "log" not in step(toy(2), 0.0, 0.0)[3]


def toy(num_envs: int, **settings: Any) -> RslRlEnv:
    return RslRlEnv(toy_env(Line(), num_envs, **settings))


def test_metrics_are_means_over_the_steps_of_an_episode() -> None:
    with watched(Line):
        env = toy(1, max_episode_steps=2)
        step(env, 1.0)
        log = step(env, 0.5)[3]["log"]
    # In two steps the point is at 1 and at 1.5.
    assert (log["metric/distance"].item(), log["metric/is_step"].item()) == (1.25, 1.0)
    assert log["reward/progress"].item() == 1.5


def test_a_rollout_is_that_of_the_envs_themselves() -> None:
    settings: dict[str, Any] = {"seed": 4, "device": "cpu", "max_episode_steps": 30}
    env = lockstep.make_rsl_rl_env("cartpole_classic", 16, **settings)
    own = lockstep.make_env("cartpole_classic", 16, randomize_initial_episode_length=False, **settings)
    generator = torch.Generator().manual_seed(0)
    num_ends = 0
    for _ in range(90):
        actions = torch.randn((16, 1), generator=generator)
        observations, rewards, dones, extras = env.step(actions)
        transition = own.step(actions)
        for name in ("actor", "critic"):
            assert torch.equal(observations[name], transition.observations[name])
            assert torch.equal(extras["final_observations"][name], transition.final_observations[name])
        assert torch.equal(rewards, transition.reward)
        assert torch.equal(dones == 1, transition.done)
        assert torch.equal(extras["time_outs"], transition.truncated)
        assert torch.equal(env.episode_length_buf, own.episode_length)
        num_ends += int(dones.sum())
    assert num_ends > 30
    first = lockstep.make_rsl_rl_env("cartpole_classic", 16, **settings).get_observations()
    assert torch.equal(env.reset()[0]["actor"], first["actor"])


def test_episode_lengths_that_are_set_are_the_envs() -> None:
    env = toy(3, max_episode_steps=10)
    env.episode_length_buf = torch.tensor([0, 8, 9])
    assert env.episode_length_buf.tolist() == [0, 8, 9]
    found = []
    for _ in range(10):
        *_, dones, extras = step(env, 0.0, 0.0, 0.0)
        assert dones.tolist() == extras["time_outs"].int().tolist()
        found.append(dones.tolist())
    ends = [[number for number, row in enumerate(found, 1) if row[column]] for column in range(3)]
    assert ends == [[10], [2], [1]]
    # Only the first was whole: lockstep's own statistics leave the others out.
    assert env.env.episodes.take().tolist() == [0.0, 10.0, 10.0, 1.0]
    with pytest.raises(ValueError, match=r"shape \(2,\), not \(3,\)"):
        env.episode_length_buf = torch.tensor([1, 2])


def test_envs_live_on_after_inference_mode() -> None:
    env = lockstep.make_rsl_rl_env("cartpole_balance", 2, device="cpu", max_episode_steps=3)
    with torch.inference_mode():
        env.episode_length_buf = torch.randint_like(env.episode_length_buf, high=3)
        for _ in range(4):
            observations, *_, extras = env.step(torch.rand(2, 1))
    # None of these could be written to, or be learned from, if it were a tensor of that mode.
    assert not any(tensor.is_inference() for tensor in (*observations.values(), extras["time_outs"]))
    for _ in range(4):
        env.step(torch.rand(2, 1, requires_grad=True))
    env.reset()
    env.close()


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(UsageError, match="RSL-RL has no policy for discrete actions, which Recall has"):
        RslRlEnv(toy_env(Recall(), 2))
    with pytest.raises(
        UsageError, match=r"which cartpole_classic has; PPO of lockstep, .* takes them \(--rl_library\)"
    ):
        lockstep.make_rsl_rl_env("cartpole_classic", 2, device="cpu", action_kind="discrete")


class Kept(LogWriter):  # type: ignore[misc]
    """Keeps what the runner logs."""

    scalars: dict[str, list[float]]

    def __init__(self, log_dir: str) -> None:
        Kept.scalars = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        Kept.scalars.setdefault(tag, []).append(float(scalar_value))


def test_rsl_rls_runner_trains_on_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    random.seed(1)
    network = {"class_name": "MLPModel", "hidden_dims": [8], "activation": "elu"}
    settings = {
        "num_steps_per_env": 8,
        "save_interval": 100,
        "logger": {"class_name": Kept},
        "obs_groups": {"actor": ["actor"], "critic": ["actor", "critic"]},
        "actor": network | {"distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": network,
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2},
    }
    env = lockstep.make_rsl_rl_env("cartpole_balance", 16, device="cpu", max_episode_steps=20)
    runner = OnPolicyRunner(env, settings, log_dir=str(tmp_path), device="cpu")
    runner.learn(6, init_at_random_ep_len=True)
    # Episodes end at different times, and what RSL-RL counts itself agrees with what the env tells it.
    assert len(set(runner.logger.lenbuffer)) > 5
    assert max(runner.logger.lenbuffer) == 20
    terms = [name for name in Kept.scalars if name.startswith("reward/")]
    assert terms == [f"reward/{name}" for name in env.env.task.reward_terms]
    assert [len(Kept.scalars[name]) for name in terms] == [len(Kept.scalars["Train/mean_reward"])] * len(terms)
    # In the first iteration RSL-RL's own mean is over the same episodes.
    in_all = sum(Kept.scalars[name][0] for name in terms)
    assert in_all == pytest.approx(Kept.scalars["Train/mean_reward"][0], rel=1e-4)


def test_other_peoples_envs_pass_through_us_to_rsl_rl() -> None:
    pytest.importorskip("gymnasium", reason="needs Gymnasium: pip install 'lockstep-rl[gymnasium]'")
    env = lockstep.make_rsl_rl_env("gymnasium/Pendulum-v1", 2, device="cpu", max_episode_steps=5)
    env.episode_length_buf = torch.tensor([0, 3])
    ends = [env.step(torch.zeros(2, 1))[3]["time_outs"].tolist() for _ in range(5)]
    assert ends == [[False, False], [False, True], [False, False], [False, False], [True, False]]
    assert env.episode_length_buf.tolist() == [0, 3]
    env.close()
