"""rl_games' learner in one process: it learns, decides as rl_games' players do, goes on where it was, stays quiet."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_games.algos_torch.players import PpoPlayerContinuous, PpoPlayerDiscrete
from rl_games.algos_torch.running_mean_std import RunningMeanStd

from lockstep.adapters.rl_games.env import RlGamesEnv
from lockstep.adapters.rl_games.learner import RlGamesLearner
from lockstep.adapters.rl_games.normalizer import FrozenMeanStd
from lockstep.adapters.rl_games.settings import params_of
from lockstep.core.errors import UsageError
from lockstep.distributed.torch_comm import SoloComm
from lockstep.session.deployed import deploy
from lockstep.session.torch_policy import TorchPolicy
from tests.unit.learner_fixtures import Line, Recall, differences, round_trip, toy_env
from tests.unit.rl_games_fixtures import config_with, training_of


def recall_env(num_envs: int = 8) -> Any:
    return toy_env(Recall(), num_envs, dtype=torch.float32)


@pytest.mark.parametrize("schedule", ["adaptive", "fixed"])
def test_it_learns(schedule: str) -> None:
    agent = {"actor_hidden_dims": (32,), "critic_hidden_dims": (32,), "num_steps_per_env": 16}
    agent |= {"num_learning_epochs": 5, "num_mini_batches": 4, "schedule": schedule, "learning_rate": 3e-3}
    training = training_of(config_with("cartpole_classic", num_envs=64, agent=agent))
    curve = [training.iterate() for _ in range(15)]
    assert curve[2]["mean_return"] < 35
    assert max(metrics["mean_return"] or 0 for metrics in curve) > 2 * curve[2]["mean_return"]
    named = {"loss/surrogate", "loss/value", "loss/entropy", "kl", "learning_rate"}
    assert named <= curve[-1].keys()
    assert (curve[-1]["learning_rate"] == 3e-3) == (schedule == "fixed")


def test_it_learns_by_a_memory_and_discrete_actions() -> None:
    """Only who remembers the cue gets more than 0.5."""
    agent = {"actor_hidden_dims": (16,), "critic_hidden_dims": (16,), "recurrent": "gru", "recurrent_hidden_dim": 16}
    agent |= {"num_steps_per_env": 20, "num_mini_batches": 4, "num_learning_epochs": 5, "learning_rate": 1e-2}
    config = config_with(num_envs=64, agent=agent)
    training = training_of(config, env=toy_env(Recall(), 64, dtype=torch.float32))
    curve = [training.iterate()["mean_return"] for _ in range(12)]
    assert curve[0] < 0.6 and curve[-1] > 0.85


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize("task", ["cartpole_balance", "recall"])
def test_a_policy_decides_as_the_player_of_rl_games_does(task: str, recurrent: str, tmp_path: Path) -> None:
    config = config_with(agent={"recurrent": recurrent})
    training = training_of(config, env=recall_env() if task == "recall" else None)
    training.iterate()
    env, state = training.env, round_trip(training.state_dict())["state"]
    params = params_of(config, env.task, 8, state["sees_more"])
    torch.save({"model": state["model"]}, tmp_path / "model.pth")
    params["config"] |= {"env_info": RlGamesEnv(env, with_states=False).get_env_info(), "device_name": "cpu"}
    player: Any = (PpoPlayerDiscrete if task == "recall" else PpoPlayerContinuous)(copy.deepcopy(params))
    player.restore(str(tmp_path / "model.pth"))
    player.has_batch_dimension, player.batch_size = True, 8
    player.states = player.model.get_default_rnn_state() and [
        part.repeat(1, 8, 1) for part in player.model.get_default_rnn_state()
    ]
    loaded = RlGamesLearner.load_policy(config, state, env.task)
    memory = own_memory = loaded.initial_memory(8)
    observations = env.reset()
    for _ in range(3):
        actions, memory = loaded.most_likely(observations, memory)
        own, own_memory = training.policy.most_likely(observations, own_memory)
        torch.testing.assert_close(actions, player.get_action(observations["actor"], is_deterministic=True))
        assert torch.equal(actions, own)
        observations = env.step(actions).observations


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_what_is_exported_decides_as_the_policy(recurrent: str) -> None:
    config = config_with(agent={"recurrent": recurrent})
    training = training_of(config)
    for _ in range(2):
        training.iterate()
    state = round_trip(training.state_dict())["state"]
    policy = RlGamesLearner.load_policy(config, state, training.env.task)
    deployed = deploy(TorchPolicy(config, 2, policy))
    memory, kept = policy.initial_memory(8), deployed.initial_state(8)
    for seed in range(3):
        observations = 3 * torch.randn((8, 5), generator=torch.Generator().manual_seed(seed))
        actions, memory = policy.most_likely({"actor": observations}, memory)
        if recurrent == "none":
            exported = deployed(observations)
        else:
            exported, kept = deployed(observations, kept)
        torch.testing.assert_close(exported, actions)


def test_a_policy_that_rl_games_clips_is_played_and_not_exported() -> None:
    config = config_with(library={"config": {"clip_actions": True}, "network": {"mlp": {"units": [4]}}})
    training = training_of(config)
    with torch.no_grad():
        training.learner.agent.plain_model.a2c_network.mu.bias.fill_(9.0)
    actions, _ = training.policy.most_likely(training.env.observations, training.policy.initial_memory(8))
    assert actions.eq(1.0).all()
    with pytest.raises(UsageError, match=r"library\.config\.clip_actions can't be exported"):
        training.policy.parts()


@pytest.mark.parametrize("task", ["cartpole_balance", "cartpole_classic"])
def test_a_training_goes_on_bit_for_bit(task: str) -> None:
    config = config_with(task)
    first = training_of(config)
    for _ in range(2):
        first.iterate()
    saved = round_trip(first.state_dict())
    second = training_of(config)
    second.load_state_dict(saved, "model_2.pt")
    assert differences(saved, second.state_dict()) == []
    torch.rand(3)  # the generator is elsewhere
    for training in (first, second):
        metrics = training.iterate()
        assert metrics["iteration"] == 3
    assert differences(first.state_dict(), second.state_dict()) == []


@pytest.mark.parametrize("schedule", ["adaptive", "fixed"])
def test_a_training_goes_on_at_another_learning_rate(schedule: str) -> None:
    first = training_of(config_with(agent={"schedule": schedule}))
    first.iterate()
    saved = round_trip(first.state_dict())
    agent = {"schedule": schedule, "learning_rate": 2e-4, "desired_kl": 1e3, "max_learning_rate": 2e-4}
    second = training_of(config_with(agent=agent))
    second.load_state_dict(saved, "model_1.pt")
    inner = second.learner.agent
    optimizers = (inner.optimizer, inner.central_value_net.optimizer)
    assert [group["lr"] for each in optimizers for group in each.param_groups] == [2e-4, 2e-4]
    assert second.iterate()["learning_rate"] == 2e-4
    assert [group["lr"] for each in optimizers for group in each.param_groups] == [2e-4, 2e-4]
    central = {"central_value_config": {"learning_rate": 5e-5}}
    own = training_of(config_with(agent=agent, library={"config": {"learning_rate": 3e-4} | central}))
    own.load_state_dict(saved, "model_1.pt")
    assert own.learner.agent.last_lr == saved["state"]["counters"]["last_lr"]
    assert own.learner.agent.central_value_net.lr == 1e-3


class Doubting(Recall):
    """The critic sees as much as the actor, and at the start of an episode the very same."""

    def observations(self, xp: Any, state: Any, noise: Any) -> dict[str, Any]:
        seen = super().observations(xp, state, noise)
        return seen | {"critic": seen["critic"] + 0.0 * noise.sum()}


def test_what_the_critic_sees_is_decided_by_the_task_and_not_by_what_it_happens_to_see() -> None:
    config = config_with()
    alike = training_of(config, env=recall_env())
    other = training_of(config, env=toy_env(Doubting(), 8, dtype=torch.float32))
    assert not alike.learner.agent.has_central_value and other.learner.agent.has_central_value
    for _ in range(2):
        alike.iterate()  # after which the groups of its envs are tensors of their own
    saved = round_trip(alike.state_dict())
    training_of(config, env=recall_env()).load_state_dict(saved, "model_2.pt")
    with pytest.raises(UsageError, match=r"critic of the checkpoint and that of .* are not of the same kind"):
        other.load_state_dict(saved, "model_2.pt")
    with pytest.raises(UsageError, match="not of the same kind"):
        other.load_weights(saved, "model_2.pt")


def test_weights_alone_begin_a_new_training() -> None:
    config = config_with()
    first, second = training_of(config), training_of(config)
    first.iterate()
    saved = round_trip(first.state_dict())
    second.load_weights(saved, "model_1.pt")
    state = second.state_dict()["state"]
    assert differences(saved["state"]["model"], state["model"]) == []
    assert differences(saved["state"]["central value"], state["central value"]) == []
    assert state["optimizer"]["state"] == {} and state["counters"]["epoch_num"] == 0


def test_the_normalizer_is_rl_games_own_but_frozen() -> None:
    frozen, own = FrozenMeanStd((3,)), RunningMeanStd((3,))
    frozen.train()
    for seed in range(3):
        samples = 5 + 2 * torch.randn((7, 3), generator=torch.Generator().manual_seed(seed))
        before = frozen.running_mean.clone()
        frozen(samples)
        assert torch.equal(frozen.running_mean, before)
        frozen.merge_(samples, SoloComm())
        own(samples.double())
    for name, buffer in own.named_buffers():
        torch.testing.assert_close(frozen.get_buffer(name), buffer)
    own.eval()
    torch.testing.assert_close(frozen(samples), own(samples))


def test_samples_count_once_however_many_passes_are_made() -> None:
    training = training_of(config_with(agent={"num_learning_epochs": 3}))
    for _ in range(2):
        training.iterate()
    agent = training.learner.agent
    assert agent.plain_model.running_mean_std.count == 1 + 2 * 8 * 6  # 1 is rl_games' beginning
    assert agent.plain_central_value.running_mean_std.count == 1 + 2 * 8 * 6
    assert agent.value_mean_std.count == 1 + 2 * 2 * 8 * 6  # values and returns


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_where_the_time_limit_ends_an_episode_the_value_of_its_end_is_still_to_come(recurrent: str) -> None:
    """The critic says 100 everywhere; episodes of 3 steps, so 2 of 6 steps end one."""
    config = config_with(agent={"recurrent": recurrent, "gamma": 0.5}, library={"config": {"normalize_value": False}})
    training = training_of(config, env=toy_env(Line(), 8, max_episode_steps=3, dtype=torch.float32))
    agent = training.learner.agent
    value = agent.plain_central_value.a2c_network.value
    with torch.no_grad():
        value.weight.zero_()
        value.bias.fill_(100.0)
    agent.plain_model.a2c_network.sigma.data.fill_(-9.0)  # so small steps that nobody arrives at the end of the line
    training.learner.collect()
    rewards = agent.experience_buffer.tensor_dict["rewards"][..., 0]
    late = torch.zeros(6, 8)
    late[[2, 5]] = 50.0
    torch.testing.assert_close(rewards, 1.0 + late, atol=0.5, rtol=0)


def test_nothing_is_printed_and_no_file_is_left(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    training = training_of(config_with())
    training.iterate()
    assert capfd.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_compiled_models_are_those_that_are_saved() -> None:
    """Compiling itself would take longer than all tests of this file; who is asked to is what counts here."""
    asked: list[Any] = []

    def compile_(model: Any, mode: str) -> Any:
        asked.append((model, mode))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_)
        agent = training_of(config_with(library={"config": {"torch_compile": True}})).learner.agent
    assert asked == [(agent.plain_model, "default"), (agent.plain_central_value, "default")]
