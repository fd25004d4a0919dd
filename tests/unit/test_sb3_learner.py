"""Stable-Baselines3's learners: they learn, decide as the library's own ``predict``, go on, and refuse by name."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.adapters.sb3.learner import Sb3Learner
from lockstep.adapters.sb3.settings import told
from lockstep.core.config import merge
from lockstep.core.errors import UsageError
from lockstep.core.registry import load
from lockstep.core.types import ActionSpace
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.agent_config import AGENTS
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.guest import GuestTraining
from lockstep.recipes.catalog import TASKS, make_task
from lockstep.recipes.libraries import require_several
from lockstep.session.deployed import deploy
from lockstep.session.make_env import build_env
from lockstep.session.torch_policy import TorchPolicy
from tests.unit.learner_fixtures import Line, Recall, differences, round_trip, toy_env

SMALL = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,), "num_steps_per_env": 6}
OF_PPO = SMALL | {"num_learning_epochs": 2, "num_mini_batches": 2}
OF_REPLAY = SMALL | {"num_updates": 2, "batch_size": 16, "learning_starts": 50}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads."""
    torch.set_num_threads(1)
    yield


def config_with(algorithm: str = "ppo", task: str = "cartpole_balance", **settings: Any) -> TrainConfig:
    recipe: TrainConfig = load(TASKS.get(task).recipe)()
    agent = AGENTS[algorithm](**(OF_PPO if algorithm == "ppo" else OF_REPLAY) | settings.pop("agent", {}))
    changed = {"num_envs": 8, "device": "cpu", "rl_library": "sb3", "algorithm": algorithm, "agent": agent}
    return merge(TrainConfig(**dict(recipe) | changed), settings)


def training_of(config: TrainConfig, env: Any = None) -> Any:
    learner = "lockstep.adapters.sb3.learner:Sb3Learner"
    return GuestTraining(learner, config, build_env(config) if env is None else env, SoloComm())


def test_ppo_learns() -> None:
    agent = {"actor_hidden_dims": (32,), "critic_hidden_dims": (32,), "num_steps_per_env": 16}
    agent |= {"num_learning_epochs": 5, "num_mini_batches": 8, "learning_rate": 3e-3}
    training = training_of(config_with(task="cartpole_classic", num_envs=64, agent=agent))
    curve = [training.iterate() for _ in range(10)]
    assert curve[2]["mean_return"] < 35
    assert max(metrics["mean_return"] or 0 for metrics in curve) > 2 * curve[2]["mean_return"]
    assert {"loss/surrogate", "loss/value", "loss/entropy", "kl", "learning_rate"} <= curve[-1].keys()
    assert curve[-1]["loss/entropy"] > 0.5


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_learners_with_a_replay_find_the_better_end_of_a_line(algorithm: str) -> None:
    """The reward is the action plus 1, so the best action is the largest; with gamma 0 it is seen at once."""
    agent = {"num_steps_per_env": 4, "num_updates": 40, "batch_size": 64, "learning_starts": 100, "learning_rate": 1e-2}
    agent |= {"gamma": 0.0, "normalize_observations": False}
    env = toy_env(Line(), 16, max_episode_steps=2, dtype=torch.float32)
    training = training_of(config_with(algorithm, num_envs=16, agent=agent), env)
    curve = [training.iterate() for _ in range(8)]
    assert "loss/critic" not in curve[0] and "loss/critic" in curve[-1]
    actions, _ = training.policy.most_likely(env.reset(), training.policy.initial_memory(16))
    assert actions.min() > 0.8


@pytest.mark.parametrize("algorithm", ["ppo", "sac", "td3", "discrete"])
def test_a_policy_decides_as_the_library_does_and_so_does_what_is_exported(algorithm: str) -> None:
    config = config_with("ppo" if algorithm == "discrete" else algorithm)
    env = toy_env(Recall(), 8, dtype=torch.float32) if algorithm == "discrete" else build_env(config)
    training = training_of(config, env)
    for _ in range(3):
        training.iterate()
    policy = Sb3Learner.load_policy(config, round_trip(training.state_dict())["state"], env.task)
    model, vec_normalize = training.learner.model, training.learner.vec_normalize
    deployed = deploy(TorchPolicy(config, 3, policy))
    for _ in range(3):
        observations = env.observations["actor"]
        actions, _ = policy.most_likely({"actor": observations}, policy.initial_memory(8))
        predicted, _ = model.predict(vec_normalize.normalize_obs(observations.numpy()), deterministic=True)
        clipped = actions if algorithm == "discrete" else actions.clamp(-1, 1)
        torch.testing.assert_close(clipped, torch.from_numpy(predicted))
        torch.testing.assert_close(deployed(observations), actions)
        env.step(actions)


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_training_goes_on(algorithm: str) -> None:
    """PPO bit for bit; a replay starts empty, and nothing is learned until there is enough in it again."""
    config = config_with(algorithm)
    first = training_of(config)
    for _ in range(3):
        first.iterate()
    saved = round_trip(first.state_dict())
    second = training_of(config)
    second.load_state_dict(saved, "model_3.pt")
    assert differences(saved, second.state_dict()) == []
    metrics = []
    for training in (first, second):
        torch.rand(3), np.random.rand(3)  # noqa: NPY002 - wherever the generators are
        metrics.append(training.iterate())
    assert metrics[1]["iteration"] == 4
    if algorithm == "ppo":
        found = differences(first.state_dict(), second.state_dict())
        assert {name.rpartition(".")[0] for name in found} == {".state.moments.returns"}  # of use to norm_reward alone
    else:
        assert "loss/critic" in metrics[0] and "loss/critic" not in metrics[1]
        assert "loss/critic" in second.iterate()


@pytest.mark.parametrize("algorithm", ["ppo", "sac", "td3"])
def test_a_training_goes_on_at_another_learning_rate(algorithm: str) -> None:
    first = training_of(config_with(algorithm))
    first.iterate()
    saved = round_trip(first.state_dict())
    changed = config_with(algorithm, agent={"learning_rate": 2e-5})
    if algorithm == "sac":  # the library has one rate for all
        changed = merge(changed, {"agent": {"temperature_learning_rate": 2e-5}})
    second = training_of(changed)
    second.load_state_dict(saved, "model_1.pt")
    optimizers = [value for name, value in second.learner.model.get_parameters().items() if "optimizer" in name]
    assert len(optimizers) == {"ppo": 1, "sac": 3, "td3": 2}[algorithm]
    assert {group["lr"] for each in optimizers for group in each["param_groups"]} == {2e-5}
    curve = [second.iterate() for _ in range(3)]
    assert curve[-1]["learning_rate"] == 2e-5
    own = training_of(merge(changed, {"library": {"learning_rate": 3e-4}}))
    own.load_state_dict(saved, "model_1.pt")
    assert own.learner.model.lr_schedule(1.0) == 3e-4


def test_weights_alone_begin_a_new_training() -> None:
    config = config_with()
    first, second = training_of(config), training_of(config)
    first.iterate()
    saved = round_trip(first.state_dict())
    second.load_weights(saved, "model_1.pt")
    state = second.state_dict()["state"]
    assert differences(saved["state"]["parameters"]["policy"], state["parameters"]["policy"]) == []
    assert differences(saved["state"]["moments"], state["moments"]) == []
    assert state["counters"]["_n_updates"] == 0 and state["parameters"]["policy.optimizer"]["state"] == {}


def test_the_end_of_time_is_told_and_the_last_observation_kept() -> None:
    """Episodes of 2 steps, the last one of which is no end in itself: SAC's replay must say so."""
    config = config_with("sac", agent={"normalize_observations": False})
    env = toy_env(Line(), 8, max_episode_steps=2, dtype=torch.float32)
    training = training_of(config, env)
    training.learner.collect()
    replay = training.learner.model.replay_buffer
    assert replay.dones[:6].mean(1).tolist() == [0, 1, 0, 1, 0, 1]
    assert replay.timeouts[:6].mean(1).tolist() == [0, 1, 0, 1, 0, 1]
    moved = replay.next_observations[1, :, 0] - replay.observations[1, :, 0]
    np.testing.assert_allclose(moved, replay.actions[1, :, 0], atol=1e-6)  # and not back at the start
    assert not replay.observations[2].any()


def test_the_agent_is_told_in_the_words_of_the_library() -> None:
    agent = {"use_clipped_value_loss": True, "init_std": 0.5, "activation": "silu", "num_mini_batches": 4}
    config = config_with(agent=agent, library={"n_epochs": 7, "policy_kwargs": {"ortho_init": False}})
    arguments = told(config, make_task(config), 8).arguments
    assert arguments["batch_size"] == 12 and arguments["clip_range_vf"] == 0.2 and arguments["n_epochs"] == 7
    assert arguments["policy_kwargs"]["net_arch"] == {"pi": [8], "vf": [8]}
    assert arguments["policy_kwargs"]["activation_fn"] is torch.nn.SiLU
    assert arguments["policy_kwargs"]["log_std_init"] == pytest.approx(-0.6931472)
    assert arguments["policy_kwargs"]["ortho_init"] is False
    config = config_with("sac", agent={"init_temperature": 0.1}, library={"vec_normalize": {"norm_reward": True}})
    settings = told(config, make_task(config), 8)
    assert settings.arguments["ent_coef"] == "auto_0.1" and settings.arguments["train_freq"] == (6, "step")
    assert settings.vec_normalize == {"norm_obs": True, "norm_reward": True, "gamma": 0.99}


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        ("ppo", {"dtype": "float64"}, "dtype float64 is not available with rl_library sb3; use --dtype float32"),
        ("ppo", {"agent": {"recurrent": "gru"}}, "agent.recurrent gru is not available with rl_library sb3"),
        ("sac", {"agent": {"max_grad_norm": 3.0}}, "agent.max_grad_norm 3.0 is not available with rl_library sb3"),
        ("ppo", {"agent": {"min_learning_rate": 1e-4}}, "agent.min_learning_rate 0.0001 is not available with rl"),
        ("ppo", {"agent": {"chunk_size": 64}}, "agent.chunk_size 64 is not available with rl_library sb3; leave it"),
        ("ppo", {"library": {"n_epoch": 3}}, "n_epoch 3 is no setting of Stable-Baselines3; did you mean 'n_epochs'?"),
        (
            "ppo",
            {"library": {"n_steps": 3}},
            "library.n_steps 3: lockstep has a name of its own for it; use",
        ),
        ("ppo", {"library": {"vec_normalize": {"clip": 3}}}, "library.vec_normalize.clip 3 is no setting of Stable"),
        ("ppo", {"library": {"policy_kwargs": {"activation_fn": "Relu"}}}, "'Relu' is no class of torch.nn"),
    ],
)
def test_what_can_t_be_is_refused_by_name(algorithm: str, settings: dict[str, Any], message: str) -> None:
    config = config_with(algorithm, **settings)
    with pytest.raises(UsageError, match=re.escape(message)):
        told(config, make_task(config), 8)


def test_several_ranks_and_discrete_actions_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="algorithm ppo of rl_library sb3 can't train on 2 ranks"):
        require_several(config_with(), 2)
    with pytest.raises(UsageError, match="algorithm td3 of rl_library sb3 needs continuous actions"):
        told(config_with("td3"), Recall(), 8)


class Unbounded(Line):
    """A point that moves by however much the action says."""

    action_space = ActionSpace("continuous", 1, limit=math.inf)


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_actions_without_bounds_are_none_for_those_who_squash_them(algorithm: str) -> None:
    message = f"algorithm {algorithm} of rl_library sb3 squashes actions to the bounds of an env, and those of cart"
    with pytest.raises(UsageError, match=message):
        told(config_with(algorithm), Unbounded(), 8)


def test_ppo_leaves_actions_without_bounds_as_they_are() -> None:
    env = toy_env(Unbounded(), 8, max_episode_steps=2, dtype=torch.float32)
    training = training_of(config_with(agent={"init_std": 3.0, "normalize_observations": False}), env)
    training.learner.collect()
    buffer = training.learner.model.rollout_buffer
    goes_on = buffer.actions[0] < 3  # the end of the line
    assert np.abs(buffer.actions[0][goes_on]).max() > 1.5
    np.testing.assert_allclose(buffer.observations[1][goes_on], buffer.actions[0][goes_on])  # where it has moved to
    training.learner.update()
    with torch.no_grad():
        training.learner.model.policy.action_net.bias.fill_(5.0)
    actions, _ = training.policy.most_likely(env.observations, training.policy.initial_memory(8))
    assert actions.min() > 3.0


def test_what_of_a_recipe_the_library_can_t_follow_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    training_of(config_with())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: warning: rl_library sb3 can't follow the recipe in all: its learning rate stays ")
    assert "at 0.001, whatever agent.schedule adaptive" in line and "its critic sees what the actor sees" in line
    training_of(config_with(task="cartpole_classic", agent={"schedule": "fixed"}))
    assert capsys.readouterr().err == ""


def test_nothing_is_printed_and_no_file_is_left(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training_of(config_with()).iterate()
    assert capfd.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
