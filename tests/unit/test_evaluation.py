"""Evaluation: one whole episode per env under the most likely actions."""

import math

import pytest
import torch

from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.torch.evaluation import evaluate, summarise
from lockstep.learn.torch.networks import ActorCritic
from lockstep.learn.torch.training import make_policy
from tests.unit.learner_fixtures import Line, Recall, differences, make_training, small_config, toy_env
from tests.unit.watched_fixtures import watched


def constant_policy(action: float) -> ActorCritic:
    """Always most likely to do the same."""
    policy = make_policy(small_config(), toy_env(Line(), 1))
    last = policy.actor.perceptron[-1]
    assert isinstance(last, torch.nn.Linear)
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.constant_(last.bias, action)
    return policy


def test_returns_and_lengths_by_hand() -> None:
    # From 0 by 1 to 3: three steps with reward 1 + 1 each.
    episodes = evaluate(constant_policy(1.0), toy_env(Line(), 2))
    assert episodes.returns.tolist() == [6.0, 6.0]
    assert episodes.lengths.tolist() == [3, 3]
    assert {name: values.tolist() for name, values in episodes.term_returns.items()} == {
        "progress": [3.0, 3.0],
        "alive": [3.0, 3.0],
    }
    assert summarise(episodes, SoloComm()) == {
        "eval/mean_return": 6.0,
        "eval/mean_episode_length": 3.0,
        "eval/reward/progress": 3.0,
        "eval/reward/alive": 3.0,
    }


def test_metrics_by_hand() -> None:
    with watched(Line):
        episodes = evaluate(constant_policy(1.0), toy_env(Line(), 2))
    assert {name: values.tolist() for name, values in episodes.metric_sums.items()} == {
        "distance": [6.0, 6.0],  # 1, 2 and 3
        "is_step": [3.0, 3.0],
    }
    found = summarise(episodes, SoloComm())
    assert {name: value for name, value in found.items() if "metric" in name} == {
        "eval/metric/distance": 2.0,
        "eval/metric/is_step": 1.0,
    }
    assert found["eval/mean_return"] == 6.0


@pytest.mark.parametrize("action", [0.1, 0.07])
def test_each_env_counts_its_first_episode_alone(action: float) -> None:
    # Starts differ, so do the lengths: the first multiple of the action that reaches 3.
    env = toy_env(Line(spread=1.0), 50)
    starts = env.observations["actor"].flatten().tolist()
    episodes = evaluate(constant_policy(action), env)
    expected = [math.ceil((3 - start) / action) for start in starts]
    assert episodes.lengths.tolist() == expected
    assert len(set(expected)) > 5
    assert episodes.returns.tolist() == pytest.approx([length * (1 + action) for length in expected], rel=1e-9)


def test_the_time_limit_ends_an_episode() -> None:
    episodes = evaluate(constant_policy(0.0), toy_env(Line(), 3, max_episode_steps=45))
    assert episodes.lengths.tolist() == [45] * 3
    assert episodes.returns.tolist() == [45.0] * 3


def test_every_evaluation_meets_the_same_episodes() -> None:
    env = toy_env(Line(spread=1.0), 16)
    policy = constant_policy(0.3)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    first = evaluate(policy, env)
    assert differences(first, evaluate(policy, env)) == []
    assert differences(before, policy.state_dict()) == []
    assert len(first.lengths.unique()) > 1


def test_a_diverged_env_gives_a_finite_return() -> None:
    policy = constant_policy(math.nan)
    with watched(Line):
        episodes = evaluate(policy, toy_env(Line(), 2))
    assert episodes.returns.tolist() == [0.0, 0.0]
    assert episodes.lengths.tolist() == [1, 1]
    assert [sums.tolist() for sums in episodes.metric_sums.values()] == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_training_goes_on_as_if_nobody_had_looked(recurrent: str) -> None:
    config = small_config(agent={"recurrent": recurrent})
    looked_at, alone = (make_training(config, toy_env(Recall(), 8)) for _ in range(2))
    evaluation_env = toy_env(Recall(), 5, streams="evaluation")
    for _ in range(3):
        evaluate(looked_at.policy, evaluation_env)
        looked_at.iterate()
        alone.iterate()
    assert differences(looked_at.policy.state_dict(), alone.policy.state_dict()) == []
    assert differences(looked_at.env.state_dict(), alone.env.state_dict()) == []
