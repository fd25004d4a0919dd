"""The PPO update: beside a plain one, in chunks and on several ranks, and what an iteration reports."""

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from lockstep.core.types import FlatGradients
from lockstep.distributed.torch_comm import SoloComm
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.normalizer import Normalizer
from lockstep.learn.torch.ppo import RIDERS, Samples
from lockstep.learn.torch.reporting import Metrics
from lockstep.learn.torch.rollout import collect
from lockstep.learn.torch.statistics import Moments
from lockstep.learn.torch.training import Training
from tests.unit.learner_fixtures import (
    Line,
    Meeting,
    build_own_env,
    differences,
    make_training,
    on_every_rank,
    thread_comm,
    toy_env,
)
from tests.unit.ppo_fixtures import KINDS, config_of


def collected(training: Training) -> Samples:
    """One rollout, made ready for the update."""
    noise = training.noise.draw(training.config.agent.num_steps_per_env)
    collect(training.env, training.policy, training.memory, noise, training.rollout)
    return training.learner.prepare(training.rollout, training.env.observations["critic"], training.memory)


def assert_close(one: Training, other: Training, tolerance: float = 1e-12) -> None:
    ours, theirs = one.policy.state_dict(), other.policy.state_dict()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=tolerance, atol=tolerance), name
    torch.testing.assert_close(one.learner.learning_rate, other.learner.learning_rate, rtol=1e-12, atol=0)


# --- the update ----------------------------------------------------------------------------------------------------


def plain_update(training: Training, samples: Samples) -> dict[str, torch.Tensor]:
    """One step on the whole batch with torch's own distributions, clipping and Adam."""
    policy, config, batch = copy.deepcopy(training.policy), training.learner.config, samples.batch
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    assert policy.log_std is not None
    means = policy.actor.perceptron(batch.actor_observations)
    normal = torch.distributions.Normal(means, policy.log_std.exp().expand_as(means))
    values = policy.critic.perceptron(batch.critic_observations).squeeze(-1)
    ratio = torch.exp(normal.log_prob(batch.actions).sum(-1) - batch.log_probs)
    surrogate = torch.max(-ratio * batch.advantages, -ratio.clip(0.8, 1.2) * batch.advantages).mean()
    error = torch.nn.functional.mse_loss(values, batch.targets)
    loss = surrogate + config.value_loss_coef * error - config.entropy_coef * normal.entropy().sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
    optimizer.step()
    return policy.state_dict()


def test_one_step_beside_a_plain_one() -> None:
    config = config_of(
        num_learning_epochs=1,
        num_mini_batches=1,
        schedule="fixed",
        learning_rate=2.0**-7,  # the rate is kept in float32, which holds this one exactly
        use_clipped_value_loss=False,
        value_loss_coef=0.7,
        entropy_coef=0.3,
        max_grad_norm=0.5,
    )
    training = make_training(config)
    samples = collected(training)
    # Some ratios beyond the clip range, either way.
    samples.batch.log_probs.add_(torch.linspace(-0.5, 0.5, samples.batch.log_probs.numel()).reshape(6, 8))
    expected = plain_update(training, samples)
    result = training.learner.update(samples, training.memory, 0)
    assert result.gradient_norm > 0.5
    for name, tensor in training.policy.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "recurrent"), KINDS)
def test_before_the_first_step_the_policy_is_the_one_that_acted(kind: str, recurrent: str) -> None:
    # So memories, episode ends and stored log probabilities belong together, in later iterations too.
    training = make_training(config_of(kind, recurrent, num_learning_epochs=1, num_mini_batches=1))
    for _ in range(4):
        metrics = training.iterate()
        assert metrics["kl"] == pytest.approx(0, abs=1e-12)
        # With a ratio of 1 the surrogate is minus the mean of the standardised advantages.
        assert metrics["loss/surrogate"] == pytest.approx(0, abs=1e-12)
    assert metrics["num_episodes"]


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_the_size_of_chunks_does_not_change_the_update(recurrent: str) -> None:
    trainings = [make_training(config_of("continuous", recurrent, chunk_size=size)) for size in (10000, 7, 1)]
    for _ in range(3):
        for training in trainings:
            training.iterate()
    assert_close(trainings[0], trainings[1])
    assert_close(trainings[0], trainings[2])


def test_the_fixed_schedule_keeps_the_rate_and_the_adaptive_one_steers_the_optimizers() -> None:
    fixed = make_training(config_of(schedule="fixed", learning_rate=3e-3))
    adaptive = make_training(config_of(schedule="adaptive", learning_rate=3e-3, desired_kl=1e-7))
    for training in (fixed, adaptive):
        training.iterate()
        (group,) = training.learner.optimizer.param_groups
        assert group["lr"] is training.learner.learning_rate
    assert fixed.learner.learning_rate.item() == pytest.approx(3e-3, rel=1e-7)
    assert adaptive.learner.learning_rate.item() < 3e-3


# --- the estimates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_what_follows_a_step_is_valued_by_how_it_ended(recurrent: str) -> None:
    agent = {"gamma": 0.5, "lam": 0.0, "normalize_advantages": False, "chunk_size": 5, "init_std": 2.0}
    config = config_of("continuous", recurrent, **agent)
    training = make_training(config, toy_env(Line(spread=1.0), 8, max_episode_steps=4, randomize=True))
    policy, rollout = training.policy, training.rollout
    for _ in range(2):
        state = training.memory.critic
        samples = collected(training)
        last = training.env.observations["critic"]  # without a merge so far the normaliser is the identity
        with torch.no_grad():
            for step in range(6):
                value, after = policy.critic.step(rollout.critic_observations[step], state)
                torch.testing.assert_close(samples.batch.values[step], value.squeeze(-1), rtol=1e-10, atol=1e-10)
                final, _ = policy.critic.step(rollout.final_critic_observations[step], after)
                state = after * (~rollout.done[step]).unsqueeze(-1)
                following = rollout.critic_observations[step + 1] if step < 5 else last
                going_on, _ = policy.critic.step(following, state)
                # With lambda 0 an advantage is the difference of one step.
                ahead = samples.batch.advantages[step] + value.squeeze(-1) - rollout.rewards[step]
                expected = 0.5 * torch.where(rollout.truncated[step].unsqueeze(1), final, going_on).squeeze(-1)
                expected[rollout.terminated[step]] = 0.0
                torch.testing.assert_close(ahead, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(samples.critic_state, state, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(samples.batch.targets, samples.batch.advantages + samples.batch.values)
        training.memory = training.memory._replace(critic=samples.critic_state)
        assert rollout.truncated.any()
        assert rollout.terminated.any()


def test_normalizers_take_up_each_rollout_once_and_are_frozen_until_then() -> None:
    training = make_training(config_of())
    normalizer = training.policy.actor_normalizer
    assert isinstance(normalizer, Normalizer)
    seen: list[torch.Tensor] = []
    for iteration in range(3):
        before = {name: buffer.clone() for name, buffer in normalizer.state_dict().items()}
        samples = collected_raw(training, seen)
        training.learner.update(samples, training.memory, iteration)
        assert differences(before, normalizer.state_dict()) == []
        training.learner.merge_normalizers(samples)
    pooled = torch.cat(seen)
    assert normalizer.count.item() == 3 * 6 * 8 == pooled.shape[0]
    torch.testing.assert_close(normalizer.mean, pooled.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(normalizer.m2 / 144, pooled.var(0, correction=0), rtol=1e-12, atol=1e-12)


def collected_raw(training: Training, seen: list[torch.Tensor]) -> Samples:
    noise = training.noise.draw(6)
    collect(training.env, training.policy, training.memory, noise, training.rollout)
    raw = training.rollout.actor_observations.clone()
    seen.append(raw.flatten(0, 1))
    samples = training.learner.prepare(training.rollout, training.env.observations["critic"], training.memory)
    # What the update works on is the raw observations, normalised by what was merged before.
    assert torch.equal(samples.batch.actor_observations, training.policy.actor_normalizer(raw))
    return samples


def test_advantages_are_standardised_over_the_rollout() -> None:
    samples = collected(make_training(config_of()))
    assert samples.batch.advantages.mean().item() == pytest.approx(0, abs=1e-12)
    assert samples.batch.advantages.std(correction=0).item() == pytest.approx(1, abs=1e-6)


# --- ranks ---------------------------------------------------------------------------------------------------------


def rank_env(config: TrainConfig, first_env: int, num_envs: int) -> TorchEnv:
    source = build_own_env(config, num_envs=num_envs)
    return TorchEnv(
        source.task,
        source.engine,
        config.env,
        seed=config.seed,
        device=source.device,
        dtype=source.dtype,
        first_env_id=first_env,
        noise_block=config.agent.num_steps_per_env,
    )


def untimed(metrics: Metrics) -> dict[str, float]:
    """What doesn't depend on how fast a rank is; -1 stands for the mean over no episodes."""
    kept = {name: value for name, value in metrics.items() if not name.startswith(("time/", "steps_per_s"))}
    return {name: -1.0 if value is None else value for name, value in kept.items()}


@pytest.mark.parametrize("sizes", [(4, 4), (6, 2), (2, 4, 2)])
@pytest.mark.parametrize(("kind", "recurrent"), [("continuous", "none"), ("discrete", "none"), ("continuous", "gru")])
def test_ranks_together_learn_what_one_process_does(kind: str, recurrent: str, sizes: tuple[int, ...]) -> None:
    config = config_of(kind, recurrent)
    alone = make_training(config)
    meeting = Meeting(len(sizes))
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    ranks = on_every_rank(
        meeting,
        lambda rank: make_training(config, rank_env(config, starts[rank], sizes[rank]), thread_comm(rank, meeting)),
    )
    for _ in range(4):
        expected = alone.iterate()
        for metrics in on_every_rank(meeting, lambda rank: ranks[rank].iterate()):
            assert untimed(metrics) == pytest.approx(untimed(expected), rel=1e-9, abs=1e-12)
    for training in ranks:
        assert_close(alone, training)
        # Among the ranks there is no rounding either.
        assert differences(ranks[0].policy.state_dict(), training.policy.state_dict()) == []
    counts = [training.policy.state_dict()["actor_normalizer.count"].item() for training in (alone, *ranks)]
    assert counts == [4 * 6 * 8] * (1 + len(sizes))


class CountingComm(SoloComm):
    """Counts its collectives."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def mean_gradients_(self, gradients: FlatGradients, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.calls["mean_gradients_"] += 1
        super().mean_gradients_(gradients, meanwhile)

    def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        self.calls["gather"] += 1
        return super().gather(tensor, tag)


def test_one_collective_per_minibatch_and_two_per_iteration() -> None:
    comm = CountingComm()
    training = make_training(config_of(num_learning_epochs=3, num_mini_batches=4, chunk_size=2), comm=comm)
    comm.calls.clear()
    training.iterate()
    assert comm.calls == {"mean_gradients_": 12, "gather": 2}


# --- what an iteration reports -------------------------------------------------------------------------------------


def test_metrics() -> None:
    training = make_training(config_of())
    for iteration in (1, 2, 3):
        metrics = training.iterate()
        assert metrics["iteration"] == iteration == training.iteration
        assert metrics["env_steps"] == iteration * 6 * 8 == training.env_steps
    assert all(value is None or type(value) in (int, float) for value in metrics.values())
    expected = {"iteration", "env_steps", "steps_per_s", "mean_return", "mean_episode_length", "num_episodes"}
    expected |= {"reward/alive", "kl", "learning_rate", "gradient_norm", "num_diverged"}
    expected |= {f"loss/{name}" for name in RIDERS if name != "kl"}
    expected |= {f"time/{part}_{kind}" for part in ("rollout", "update", "wait") for kind in ("mean", "min", "max")}
    assert metrics.keys() == expected
    assert metrics["num_diverged"] == 0


def test_moments_over_ranks_are_those_of_the_raw_observations() -> None:
    training = make_training(config_of())
    training.iterate()
    seen: list[torch.Tensor] = []
    samples = collected_raw(training, seen)
    assert torch.equal(samples.actor_moments.pack(), Moments.of(torch.cat(seen)).pack())
