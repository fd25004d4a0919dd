"""Three iterations, saved, taken up again and three more: bit for bit six in one go."""

import io
from typing import Any

import pytest
import torch

from lockstep.core.errors import UsageError
from lockstep.core.rng import Stream
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.training import Training
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig
from tests.unit.learner_fixtures import differences, make_training, round_trip, small_config


def after(training: Training, num_iterations: int) -> dict[str, Any]:
    for _ in range(num_iterations):
        training.iterate()
    return round_trip(training.state_dict())


def resumed(config: TrainConfig, saved: dict[str, Any]) -> Training:
    training = make_training(config)
    training.load_state_dict(saved, "model_3.pt")
    return training


def untimed(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != "wall_s"}


def assert_resumes_exactly(config: TrainConfig) -> None:
    at_once = after(make_training(config), 6)
    saved = after(make_training(config), 3)
    continued = after(resumed(config, saved), 3)
    assert differences(untimed(at_once), untimed(continued)) == []
    assert at_once["iteration"] == 6
    assert at_once["env_steps"] == 6 * 6 * 8
    # And it did learn in between: every parameter is another one.
    for name, tensor in at_once["policy"].items():
        assert not torch.equal(tensor, saved["policy"][name]), name


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_six_iterations_are_three_and_three(kind: str, recurrent: str) -> None:
    assert_resumes_exactly(
        small_config(env={"action_kind": kind, "max_episode_steps": 9}, agent={"recurrent": recurrent})
    )


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_in_other_precisions_too(recurrent: str, dtype: str) -> None:
    assert_resumes_exactly(small_config(dtype=dtype, agent={"recurrent": recurrent}))


def test_in_mujoco_too() -> None:
    env = CartpoleBalanceConfig(observation_noise=0.02, max_episode_steps=12)
    assert_resumes_exactly(small_config().model_copy(update={"task": "cartpole_balance", "env": env}))


def test_the_learning_rate_continues_and_keeps_steering() -> None:
    config = small_config(agent={"desired_kl": 1e-9})
    saved = after(make_training(config), 3)
    assert saved["learning_rate"] < config.agent.learning_rate
    training = resumed(config, saved)
    assert torch.equal(training.learner.learning_rate, saved["learning_rate"])
    (group,) = training.learner.optimizer.param_groups
    assert group["lr"] is training.learner.learning_rate


def test_a_resumed_training_is_guarded_as_before() -> None:
    training = resumed(small_config(), after(make_training(small_config()), 3))
    before = round_trip(training.state_dict())["policy"]
    training.policy.get_parameter("log_std").register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(Exception, match="gradient of log_std"):
        training.iterate()
    assert differences(before, training.policy.state_dict()) == []


def test_streams_have_no_state_of_their_own() -> None:
    # So there is nothing in a checkpoint that two processes could share by mistake.
    saved = after(make_training(small_config()), 1)
    assert saved["env"]["num_steps"] == 6
    assert not any(isinstance(value, Stream) for value in saved.values())


# --- a checkpoint that does not fit --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return after(make_training(small_config()), 1)


def refused(config: TrainConfig, content: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        make_training(config).load_state_dict(content, "model_1.pt")
    message = str(caught.value)
    assert "\n" not in message
    assert "model_1.pt" in message
    return message


def test_another_number_of_envs(saved: dict[str, Any]) -> None:
    message = refused(small_config(num_envs=4), saved)
    assert "has 8 envs, not 4" in message
    assert "--checkpoint" in message


def test_another_task(saved: dict[str, Any]) -> None:
    message = refused(small_config(), saved | {"task": "cartpole_swingup"})
    assert "of task 'cartpole_swingup', not 'cartpole_classic'" in message


@pytest.mark.parametrize(
    ("agent", "what"),
    [
        ({"actor_hidden_dims": (9,)}, r"actor.perceptron.0.weight of shape (8, 4), the config asks for (9, 4)"),
        ({"actor_hidden_dims": (8, 8)}, "actor.perceptron.2.weight of shape (1, 8), the config asks for (8, 8)"),
        ({"critic_hidden_dims": ()}, "critic.perceptron"),
        ({"recurrent": "gru"}, "actor.memory"),
        ({"normalize_observations": False}, "has actor_normalizer.count, which the config has no place for"),
    ],
)
def test_other_agent_settings(saved: dict[str, Any], agent: dict[str, Any], what: str) -> None:
    message = refused(small_config(agent=agent), saved)
    assert what in message
    assert "agent settings" in message


def test_another_kind_of_action(saved: dict[str, Any]) -> None:
    refused(small_config(env={"action_kind": "discrete"}), saved)


@pytest.mark.parametrize("name", ["optimizer", "learning_rate", "env", "memory"])
def test_a_missing_part(saved: dict[str, Any], name: str) -> None:
    message = refused(small_config(), {key: value for key, value in saved.items() if key != name})
    assert f"has no {name}" in message
    assert "--checkpoint" in message


def test_weights_alone_start_a_new_run(saved: dict[str, Any]) -> None:
    training = make_training(small_config(num_envs=4))
    training.load_weights(saved, "model_1.pt")
    assert differences(saved["policy"], training.policy.state_dict()) == []
    assert (training.iteration, training.env_steps) == (0, 0)
    for state in training.learner.optimizer.state_dict()["state"].values():
        assert all(not tensor.any() for tensor in state.values())
    assert training.learner.learning_rate.item() == pytest.approx(1e-3)
    training.iterate()


def test_everything_saved_is_tensors_and_plain_values() -> None:
    training = make_training(small_config(agent={"recurrent": "lstm"}))
    training.iterate()
    file = io.BytesIO()
    torch.save(training.state_dict(), file)
    file.seek(0)
    content = torch.load(file, weights_only=True)
    assert differences(content, training.state_dict()) == []
