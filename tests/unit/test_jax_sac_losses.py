"""The losses of soft actor-critic, by arithmetic of another kind, and one whole gradient step as torch does it."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch

from lockstep.learn.config import SacConfig
from lockstep.learn.jax.distributions import Gaussian
from lockstep.learn.jax.replay import Experience
from lockstep.learn.jax.sac_losses import actor_loss, critic_loss, critic_target, squashed_log_prob, temperature_loss
from lockstep.learn.jax.sac_networks import SacNetworks
from lockstep.learn.jax.sac_update import Batch, Learner, SacUpdate
from tests.unit.sac_fixtures import largest_difference


@pytest.fixture(autouse=True)
def _float64(double_precision: None) -> None:
    """All that follows is in double precision."""


@pytest.mark.parametrize(("mean", "std", "action"), [(0.0, 1.0, 0.3), (0.7, 0.4, 0.9), (-1.2, 2.0, -0.99)])
def test_the_density_of_an_action_is_the_slope_of_its_cumulative_distribution(
    mean: float, std: float, action: float
) -> None:
    def cumulative(bound: float) -> float:
        return 0.5 * (1.0 + math.erf((math.atanh(bound) - mean) / (std * math.sqrt(2.0))))

    step = 1e-6
    slope = (cumulative(action + step) - cumulative(action - step)) / (2.0 * step)
    distribution = Gaussian(jnp.array([mean]), jnp.log(jnp.array([std])))
    log_prob = squashed_log_prob(distribution, jnp.array([math.atanh(action)]))
    assert float(log_prob) == pytest.approx(math.log(slope), abs=1e-7)


def test_the_density_of_several_entries_is_the_product_and_stays_finite_at_the_bounds() -> None:
    mean, log_std = jnp.array([0.1, -0.2]), jnp.array([0.0, 0.5])
    both = squashed_log_prob(Gaussian(mean, log_std), jnp.array([0.4, 0.6]))
    parts = [
        squashed_log_prob(Gaussian(mean[i : i + 1], log_std[i : i + 1]), jnp.array([value]))
        for i, value in enumerate((0.4, 0.6))
    ]
    assert float(both) == pytest.approx(float(sum(parts)), abs=1e-12)
    far = jnp.array([40.0], jnp.float32)
    distribution = Gaussian(far, jnp.zeros(1, jnp.float32))
    # At u = 40 the slope of tanh is 4 exp(-80), and the density of the normal at its mean 1 / sqrt(2 pi).
    expected = 80.0 - math.log(4.0) - 0.5 * math.log(2.0 * math.pi)
    assert float(squashed_log_prob(distribution, far)) == pytest.approx(expected, abs=1e-4)


def test_losses_by_hand() -> None:
    temperature = jnp.array(0.2)
    arguments = {
        "reward": jnp.array([1.0, 1.0]),
        "terminated": jnp.array([False, True]),
        "next_values": jnp.array([[3.0, 3.0], [2.0, 2.0]]),
        "next_log_prob": jnp.array([-0.25, -0.25]),
        "temperature": temperature,
    }
    # 1 + 0.5 * (min(3, 2) - 0.2 * -0.25); where the episode ended for good, the reward alone
    assert critic_target(**arguments, gamma=0.5).tolist() == pytest.approx([2.025, 1.0])
    assert critic_loss(jnp.array([[3.0], [1.5]]), jnp.array([2.0])).tolist() == pytest.approx([0.5 + 0.125])
    assert actor_loss(jnp.array([[3.0], [2.0]]), jnp.array([-0.25]), temperature).tolist() == pytest.approx([-2.05])
    # An entropy of 2 nats where 1.5 are asked for: -0.5 * (-2 + 1.5), and the temperature goes down.
    loss, slope = jax.value_and_grad(lambda log: temperature_loss(log, jnp.array(-2.0), 1.5))(jnp.log(0.5))
    assert [float(loss), float(slope)] == pytest.approx([0.25, 0.25])


# --- one gradient step, against an independent one ------------------------------------------------------------------

NUM_SAMPLES, SIZES, ACTION_SIZE = 7, {"actor": 3, "critic": 4}, 2
CONFIG = SacConfig(
    actor_hidden_dims=(5,),
    critic_hidden_dims=(6,),
    activation="tanh",
    learning_rate=0.01,
    temperature_learning_rate=0.02,
    init_temperature=0.3,
    gamma=0.9,
    polyak=0.25,
    max_grad_norm=0.5,
)


def perceptron(parameters: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(inputs @ parameters["layer_0"]["kernel"] + parameters["layer_0"]["bias"])
    outputs: torch.Tensor = hidden @ parameters["last"]["kernel"] + parameters["last"]["bias"]
    return outputs


class TorchSac:
    """Soft actor-critic with three losses, three backward passes and three optimizers, as it is commonly written."""

    def __init__(self, learner: Learner, weights: jax.Array) -> None:
        def own(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: torch.tensor(numpy.asarray(leaf), requires_grad=True), tree)

        self.actor = own(learner.parameters["actor"])
        self.critics = [own(jax.tree.map(lambda leaf, i=i: leaf[i], learner.parameters["critics"])) for i in range(2)]
        self.targets = [own(jax.tree.map(lambda leaf, i=i: leaf[i], learner.target_critics)) for i in range(2)]
        self.log_temperature = own(learner.parameters["log_temperature"])
        rate = CONFIG.learning_rate
        self.optimizers = [
            torch.optim.Adam(jax.tree.leaves(self.actor), lr=rate),
            torch.optim.Adam(jax.tree.leaves(self.critics), lr=rate),
            torch.optim.Adam([self.log_temperature], lr=CONFIG.temperature_learning_rate),
        ]
        self.share = torch.tensor(numpy.asarray(weights / weights.sum()))

    def act(self, inputs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = perceptron(self.actor, inputs).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        squashed = torch.distributions.TransformedDistribution(normal, [torch.distributions.TanhTransform()])
        action = torch.tanh(mean + log_std.exp() * noise)
        return action, squashed.log_prob(action).sum(-1)

    def values(self, critics: list[Any], inputs: torch.Tensor, action: torch.Tensor) -> list[torch.Tensor]:
        return [perceptron(critic, torch.cat((inputs, action), -1)).squeeze(-1) for critic in critics]

    def step(self, batch: Batch) -> None:
        parts = batch.steps._asdict().items()
        steps = SimpleNamespace(**{name: torch.tensor(numpy.asarray(part)) for name, part in parts})
        noise = torch.tensor(numpy.asarray(batch.noise))
        temperature = self.log_temperature.exp().detach()
        with torch.no_grad():
            action, log_prob = self.act(steps.next_actor_observations, noise[:, 1])
            lowest = torch.minimum(*self.values(self.targets, steps.next_critic_observations, action))
            goes_on = 1.0 - steps.terminated.double()
            target = steps.rewards + CONFIG.gamma * goes_on * (lowest - temperature * log_prob)
        critic_losses = [
            0.5 * torch.nn.functional.mse_loss(value, target, reduction="none")
            for value in self.values(self.critics, steps.critic_observations, steps.actions)
        ]
        action, log_prob = self.act(steps.actor_observations, noise[:, 0])
        lowest = torch.minimum(*self.values(self.critics, steps.critic_observations, action))
        entropy_gap = (log_prob - ACTION_SIZE).detach()
        losses = (temperature * log_prob - lowest, sum(critic_losses), -self.log_temperature.exp() * entropy_gap)
        groups = (jax.tree.leaves(self.actor), jax.tree.leaves(self.critics), [self.log_temperature])
        gradients = [
            torch.autograd.grad((loss * self.share).sum(), group, retain_graph=True)
            for loss, group in zip(losses, groups, strict=True)
        ]
        for index, (group, own) in enumerate(zip(groups, gradients, strict=True)):
            for parameter, gradient in zip(group, own, strict=True):
                parameter.grad = gradient
            if index < 2:
                torch.nn.utils.clip_grad_norm_(group, CONFIG.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for target, critic in zip(jax.tree.leaves(self.targets), groups[1], strict=True):
                target.lerp_(critic, CONFIG.polyak)


def random_batches(generator: numpy.random.Generator, count: int) -> Iterator[Batch]:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(size=(NUM_SAMPLES, *shape)))

    for _ in range(count):
        steps = Experience(
            actor_observations=normal(SIZES["actor"]),
            critic_observations=normal(SIZES["critic"]),
            actions=jnp.tanh(normal(ACTION_SIZE)),
            rewards=normal(),
            terminated=jnp.asarray(generator.random(NUM_SAMPLES) < 0.4),
            next_actor_observations=normal(SIZES["actor"]),
            next_critic_observations=normal(SIZES["critic"]),
        )
        yield Batch(steps, normal(2, ACTION_SIZE), jnp.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]))


def test_gradient_steps_are_those_of_torch_with_three_losses() -> None:
    networks = SacNetworks(CONFIG, SIZES, ACTION_SIZE, jnp.float64)
    update = SacUpdate(CONFIG, networks, target_entropy=-float(ACTION_SIZE))
    learner = update.initialise(jax.random.key(0))
    batches = list(random_batches(numpy.random.default_rng(0), 4))
    reference = TorchSac(learner, batches[0].weights)
    step = jax.jit(lambda progress, batch: update.gradient_step(progress, batch, jnp.zeros((), bool)))
    progress = update.start(learner)
    for batch in batches:
        progress = step(progress, batch)
        reference.step(batch)

    def stacked(critics: list[Any]) -> Any:
        return jax.tree.map(lambda *leaves: numpy.stack([leaf.detach().numpy() for leaf in leaves]), *critics)

    after = progress.learner
    expected = {
        "actor": jax.tree.map(lambda leaf: leaf.detach().numpy(), reference.actor),
        "critics": stacked(reference.critics),
        "log_temperature": reference.log_temperature.detach().numpy(),
    }
    assert largest_difference(after.parameters, expected) < 1e-12
    assert largest_difference(after.target_critics, stacked(reference.targets)) < 1e-12
    assert largest_difference(learner.parameters, expected) > 0.01
    assert not progress.nonfinite.any()


def test_a_fixed_temperature_stays_and_a_bad_step_changes_nothing() -> None:
    config = CONFIG.model_copy(update={"tune_temperature": False})
    update = SacUpdate(config, SacNetworks(config, SIZES, ACTION_SIZE, jnp.float64), target_entropy=-2.0)
    start = update.start(update.initialise(jax.random.key(0)))
    step = jax.jit(update.gradient_step)
    batch = next(random_batches(numpy.random.default_rng(0), 1))
    good, bad = jnp.zeros((), bool), jnp.ones((), bool)
    after = step(start, batch, good)
    assert after.learner.parameters["log_temperature"] == start.learner.parameters["log_temperature"]
    assert largest_difference(after.learner.parameters, start.learner.parameters) > 1e-3
    rewards = batch.steps.rewards.at[0].set(jnp.nan)
    spoiled = batch._replace(steps=batch.steps._replace(rewards=rewards))
    for stopped in (step(after, spoiled, good), step(after, batch, bad)):
        assert stopped.nonfinite.all()
        assert largest_difference(stopped.learner, after.learner) == 0.0
        assert largest_difference(step(stopped, batch, good).learner, after.learner) == 0.0
