"""Learning itself: the toys are learned within seconds."""

from typing import Any

import pytest
import torch

from lockstep.core.config import merge
from lockstep.learn.torch.evaluation import evaluate
from lockstep.recipes.cartpole import cartpole_classic
from lockstep.session.make_env import build_env
from tests.unit.learner_fixtures import Recall, make_training, small_config, toy_env


@pytest.mark.parametrize("action_kind", ["continuous", "discrete"])
def test_the_classic_cartpole_is_learned(action_kind: str) -> None:
    agent = {
        "num_steps_per_env": 64,
        "num_learning_epochs": 10,
        "schedule": "fixed",
        # Values are near 100: an update may move them by more than the clip range of the ratio.
        "use_clipped_value_loss": False,
    }
    overrides = {"num_envs": 64, "device": "cpu", "agent": agent, "env": {"action_kind": action_kind}}
    config = merge(cartpole_classic(), overrides)
    training = make_training(config)
    evaluation_env = build_env(config, num_envs=32, streams="evaluation")
    before = evaluate(training.policy, evaluation_env).returns.mean()
    for _ in range(20):
        training.iterate()
    episodes = evaluate(training.policy, evaluation_env)
    assert before < 200
    assert episodes.returns.mean() >= 400  # of 500
    assert torch.equal(episodes.returns.long(), episodes.lengths)


def recall(recurrent: str) -> float:
    """Train on the task that needs a memory; return the share of cues that are recalled."""
    agent: dict[str, Any] = {
        "recurrent": recurrent,
        "recurrent_hidden_dim": 16,
        "num_steps_per_env": 16,
        "num_learning_epochs": 4,
        "learning_rate": 0.01,
        "schedule": "fixed",
    }
    training = make_training(small_config(num_envs=64, agent=agent), toy_env(Recall(), 64, dtype=torch.float32))
    for _ in range(12):
        training.iterate()
    episodes = evaluate(training.policy, toy_env(Recall(), 200, dtype=torch.float32, streams="evaluation"))
    return float(episodes.returns.mean())


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
def test_a_memory_learns_to_recall(recurrent: str) -> None:
    assert recall(recurrent) > 0.95


def test_without_a_memory_there_is_only_guessing() -> None:
    assert recall("none") < 0.65
