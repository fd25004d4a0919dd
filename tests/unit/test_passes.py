"""The gradients of an update in passes that are spelled out, beside those of autograd."""

from typing import Any

import pytest
import torch

from lockstep.learn.torch import passes, ppo
from lockstep.learn.torch.minibatches import Sequences
from lockstep.learn.torch.rollout import collect
from lockstep.learn.torch.training import Training
from tests.unit.learner_fixtures import make_training
from tests.unit.ppo_fixtures import config_of


def prepared(kind: str, **agent: Any) -> tuple[Training, Sequences]:
    """A training and a minibatch of which many samples are beyond the clip range, of the ratio and of the value."""
    training = make_training(config_of(kind, activation="tanh", **agent))
    learner = training.learner
    noise = training.noise.draw(training.config.agent.num_steps_per_env)
    collect(training.env, training.policy, training.memory, noise, training.rollout)
    samples = learner.prepare(training.rollout, training.env.observations["critic"], training.memory)
    minibatch = next(learner.minibatches(samples, training.memory, 0))
    batch = minibatch.batch
    batch.log_probs.add_(torch.linspace(-0.5, 0.5, batch.log_probs.numel()))
    batch.values.add_(torch.linspace(-1.0, 1.0, batch.values.numel()).flip(0))
    with torch.no_grad():
        for parameter in training.policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return training, minibatch


def sums(training: Training, minibatch: Sequences) -> torch.Tensor:
    training.learner.accumulate(minibatch)
    return training.learner.gradients.flat.clone()


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("chunk_size", [1000, 7])
def test_gradients_and_riders_are_those_of_autograd(
    kind: str, clipped: bool, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, minibatch = prepared(
        kind,
        use_clipped_value_loss=clipped,
        chunk_size=chunk_size,
        entropy_coef=0.3,
        value_loss_coef=0.7,
        clip_param=0.1,
        actor_hidden_dims=(6, 5),
    )
    assert passes.are_spelled_out(training.policy, autocast=False)
    ours = sums(training, minibatch)
    monkeypatch.setattr(ppo, "are_spelled_out", lambda policy, autocast: False)
    theirs = sums(training, minibatch)
    assert theirs.count_nonzero() > 0.9 * theirs.numel()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize("clipped", [True, False])
def test_no_samples_give_nothing(kind: str, clipped: bool) -> None:
    training, minibatch = prepared(kind, use_clipped_value_loss=clipped)
    nothing = minibatch._replace(batch=type(minibatch.batch)(*(tensor[:0] for tensor in minibatch.batch)))
    assert not sums(training, nothing).any()


def test_where_autograd_stays() -> None:
    def spelled_out(recurrent: str = "none", autocast: bool = False, hook: bool = False) -> bool:
        policy = make_training(config_of("continuous", recurrent)).policy
        if hook:
            next(policy.parameters()).register_hook(lambda gradient: gradient)
        return passes.are_spelled_out(policy, autocast)

    assert spelled_out()
    assert not spelled_out(recurrent="gru")
    assert not spelled_out(autocast=True)
    assert not spelled_out(hook=True)
