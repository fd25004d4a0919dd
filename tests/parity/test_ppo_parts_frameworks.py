"""Every part of PPO gives the same numbers in JAX as in torch, on random inputs in double precision."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lockstep.core.types import ActionSpace
from lockstep.learn.config import PpoConfig
from lockstep.learn.jax import distributions as jax_distributions
from lockstep.learn.jax import gae as jax_gae
from lockstep.learn.jax import losses as jax_losses
from lockstep.learn.jax import minibatches as jax_minibatches
from lockstep.learn.jax import networks as jax_networks
from lockstep.learn.jax import normalizer as jax_normalizer
from lockstep.learn.jax import statistics as jax_statistics
from lockstep.learn.jax.values import CriticInputs
from lockstep.learn.jax.values import rollout_values as jax_rollout_values
from lockstep.learn.torch import distributions, gae, losses
from lockstep.learn.torch.minibatches import Dealer
from lockstep.learn.torch.networks import ActorCritic, PolicyState
from lockstep.learn.torch.normalizer import Normalizer
from lockstep.learn.torch.rollout import Rollout
from lockstep.learn.torch.statistics import Moments, standardise
from lockstep.learn.torch.values import rollout_values
from tests.parity.torch_weights import from_torch, to_torch

pytestmark = pytest.mark.usefixtures("double_precision")

TOLERANCE = 1e-12
NUM_STEPS, NUM_ENVS = 7, 6
SIZES = {"actor": 3, "critic": 5}


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(3)


def assert_same(ours: Any, torchs: Any) -> None:
    for index, (one, other) in enumerate(zip(jax.tree.leaves(ours), jax.tree.leaves(torchs), strict=True)):
        expected = other.detach().numpy()
        assert one.shape == expected.shape, index
        np.testing.assert_allclose(np.asarray(one), expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=str(index))


def in_both(function: Callable[..., Any], torch_function: Callable[..., Any], *arrays: np.ndarray) -> None:
    ours = jax.jit(function)(*(jnp.asarray(array) for array in arrays))
    assert_same(ours, torch_function(*(torch.from_numpy(array) for array in arrays)))


def test_generalised_advantages(random: np.random.Generator) -> None:
    rewards, values, next_values = random.normal(size=(3, NUM_STEPS, NUM_ENVS))
    terminated, truncated = random.random((2, NUM_STEPS, NUM_ENVS)) < 0.2
    assert terminated.any()
    assert truncated.any()
    in_both(
        partial(jax_gae.generalised_advantages, gamma=0.97, lam=0.9),
        partial(gae.generalised_advantages, gamma=0.97, lam=0.9),
        *(rewards, values, next_values, terminated, terminated | truncated),
    )


def test_losses_and_their_gradients(random: np.random.Generator) -> None:
    new, old, advantage, target = random.normal(size=(4, 50))
    new[:10] = old[:10]  # as in the first minibatch of an update: both branches of the surrogate are equal

    def ours(new: Any, old: Any, advantage: Any, target: Any) -> Any:
        def loss(new: Any) -> Any:
            return (
                jax_losses.surrogate_loss(new, old, advantage, 0.2).sum()
                + 2 * jax_losses.value_loss(new, old, target, 0.3, clipped=True).sum()
                + 4 * jax_losses.value_loss(new, old, target, 0.3, clipped=False).sum()
            )

        return jax.value_and_grad(loss)(new)

    def torchs(new: Any, old: Any, advantage: Any, target: Any) -> Any:
        new.requires_grad_()
        loss = losses.surrogate_loss(new, old, advantage, 0.2).sum()
        loss = loss + 2 * losses.value_loss(new, old, target, 0.3, clipped=True).sum()
        loss = loss + 4 * losses.value_loss(new, old, target, 0.3, clipped=False).sum()
        loss.backward()
        return loss, new.grad

    in_both(ours, torchs, new, old, advantage, target)


@pytest.mark.parametrize("kl", [0.03, 0.0201, 0.02, 0.01, 0.005, 0.0049, 0.0, np.nan])
@pytest.mark.parametrize("rate", [1e-3, 1e-5, 9e-3, 0.5])
def test_the_learning_rate_is_steered_bit_for_bit_alike(kl: float, rate: float) -> None:
    tensor = torch.tensor(rate, dtype=torch.float32)
    losses.adapt_learning_rate_(tensor, torch.tensor(kl, dtype=torch.float64), 0.01, 1e-5, 1e-2)
    ours = jax_losses.adapted_learning_rate(jnp.float32(rate), jnp.float64(kl), 0.01, 1e-5, 1e-2)
    assert ours.dtype == jnp.float32
    assert float(ours) == float(tensor)


@pytest.mark.parametrize("kind", ["Gaussian", "Categorical"])
def test_distributions(kind: str, random: np.random.Generator) -> None:
    outputs, old_outputs = random.normal(size=(2, 40, 3))
    log_std, old_log_std = random.normal(size=(2, 3))
    noise = random.normal(size=(40, 3)) if kind == "Gaussian" else random.random((40, 1))
    if kind == "Categorical":
        noise[0] = 1 - 2.0**-53  # the largest that there is

    def everything(module: Any) -> Callable[..., Any]:
        def of(*arrays: Any) -> Any:
            outputs, old_outputs, log_std, old_log_std, noise = arrays
            build = getattr(module, kind)
            parts = (
                ((outputs, log_std), (old_outputs, old_log_std)) if kind == "Gaussian" else ((outputs,), (old_outputs,))
            )
            new, old = (build(*part) for part in parts)
            action = new.sample(noise)
            again = build.unpack(new.pack())
            return (
                *(action, new.mode(), new.log_prob(action), new.entropy(), new.kl_from(old), new.pack()),
                *(again.log_prob(action), again.kl_from(new)),
            )

        return of

    in_both(everything(jax_distributions), everything(distributions), outputs, old_outputs, log_std, old_log_std, noise)


@pytest.mark.parametrize("shape", [(6, 2), (8, 4), (7, 1), (0, 2)])
def test_minibatches_are_dealt_bit_for_bit_alike(shape: tuple[int, int]) -> None:
    num_envs, num_mini_batches = shape
    ids = np.arange(4, 4 + num_envs, dtype=np.int32)
    torchs = [Dealer(5, torch.from_numpy(ids), num_mini_batches, recurrent, 100) for recurrent in (False, True)]
    ours = jax_minibatches.Dealer(5, num_mini_batches)
    samples, sequences = jax.jit(
        lambda ids, epoch: (ours.sample_indices(ids, epoch, 3, NUM_STEPS), ours.sequence_indices(ids, epoch, 3))
    )(jnp.asarray(ids), jnp.int32(11))
    expected = [torchs[0].sample_indices(epoch, NUM_STEPS) for epoch in (11, 12, 13)]
    assert samples.dtype == jnp.int32
    assert np.array_equal(samples, torch.cat(expected).numpy())
    assert np.array_equal(sequences, torch.cat([torchs[1].sequence_indices(epoch) for epoch in (11, 12, 13)]).numpy())


def test_normalisers_merge_and_normalise_alike(random: np.random.Generator) -> None:
    parts = [random.normal(loc, 2.0, size=(4, 5, 3)) for loc in (1.0, -3.0)]
    torchs, ours = Normalizer(3), jax_normalizer.new_normalizer(3)
    assert np.array_equal(jax_normalizer.normalise(jnp.asarray(parts[0]), ours), parts[0])
    for part in parts:
        torchs.merge_(Moments.of(torch.from_numpy(part)))
        ours = ours.merge(jax_statistics.Moments.of(jnp.asarray(part)))
    in_both(lambda samples: jax_normalizer.normalise(samples, ours), torchs, parts[0])
    single = parts[0].astype(np.float32)
    assert jax_normalizer.normalise(jnp.asarray(single), ours).dtype == jnp.float32
    advantages = parts[0][..., :1]
    in_both(
        lambda samples: jax_statistics.standardise(samples, jax_statistics.Moments.of(samples)),
        lambda samples: standardise(samples, Moments.of(samples)),
        advantages,
    )


def policies(kind: str, recurrent: str, activation: str = "elu") -> tuple[ActorCritic, jax_networks.ActorCritic, Any]:
    """A torch policy, the same in JAX, and their weights."""
    space = ActionSpace("discrete", 3) if kind == "discrete" else ActionSpace("continuous", 2)
    config = PpoConfig(
        recurrent=recurrent,
        activation=activation,
        recurrent_hidden_dim=4,
        actor_hidden_dims=(8, 6),
        critic_hidden_dims=(7,),
    )
    torchs = ActorCritic(config, SIZES, space)
    torchs.cast_parameters_(torch.float64)
    weights = from_torch({name: tensor.numpy() for name, tensor in torchs.state_dict().items()})
    return torchs, jax_networks.ActorCritic(config, SIZES, space, jnp.float64), weights


def random_memories(policy: ActorCritic, random: np.random.Generator) -> PolicyState:
    return PolicyState(*(torch.from_numpy(random.normal(size=part.shape)) for part in policy.initial_state(NUM_ENVS)))


@pytest.mark.parametrize(
    ("kind", "recurrent", "activation"),
    [
        ("continuous", "none", "elu"),
        ("discrete", "gru", "tanh"),
        ("continuous", "lstm", "silu"),
        ("discrete", "none", "relu"),
    ],
)
def test_policies_and_their_gradients(kind: str, recurrent: str, activation: str, random: np.random.Generator) -> None:
    torchs, ours, weights = policies(kind, recurrent, activation)
    actor, critic = (random.normal(size=(NUM_STEPS, NUM_ENVS, size)) for size in SIZES.values())
    done = random.random((NUM_STEPS, NUM_ENVS)) < 0.2
    states = random_memories(torchs, random)
    our_states = jax_networks.PolicyState(*(jnp.asarray(part.numpy()) for part in states))
    assert jax.tree.map(jnp.shape, ours.initial_state(NUM_ENVS)) == jax.tree.map(jnp.shape, our_states)

    @jax.jit
    def loss(parameters: Any) -> Any:
        given = (jnp.asarray(actor), jnp.asarray(critic))
        distribution, values = ours.evaluate(parameters, *given, our_states, jnp.asarray(done))
        first, after = ours.act(parameters, given[0][0], our_states.actor)
        total = (distribution.pack() ** 2).sum() + (values**3).sum() + first.entropy().sum() + (after**2).sum()
        return total, (distribution.pack(), values, first.pack(), after)

    gradients, results = jax.jit(jax.grad(loss, has_aux=True))(weights.parameters)
    given = (torch.from_numpy(actor), torch.from_numpy(critic))
    distribution, values = torchs.evaluate(*given, states, torch.from_numpy(done))
    first, after = torchs.act({"actor": given[0][0]}, states.actor)
    total = distribution.pack().square().sum() + values.pow(3).sum() + first.entropy().sum() + after.square().sum()
    total.backward()
    assert_same(results, (distribution.pack(), values, first.pack(), after))
    by_name = to_torch(weights._replace(parameters=gradients))
    for name, parameter in torchs.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(by_name[name], parameter.grad.numpy(), rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize(("recurrent", "chunk_size"), [("none", 100), ("none", 4), ("gru", 4), ("lstm", 100)])
def test_values_of_a_rollout(recurrent: str, chunk_size: int, random: np.random.Generator) -> None:
    torchs, ours, weights = policies("continuous", recurrent)
    observations, final = random.normal(size=(2, NUM_STEPS, NUM_ENVS, SIZES["critic"]))
    last = random.normal(size=(NUM_ENVS, SIZES["critic"]))
    terminated = random.random((NUM_STEPS, NUM_ENVS)) < 0.2
    truncated = (random.random((NUM_STEPS, NUM_ENVS)) < 0.3) & ~terminated
    truncated[-1, -1] = True  # the very last entry
    final[~truncated] = np.nan  # nobody may look at it
    state = random_memories(torchs, random)
    nothing = torch.zeros((NUM_STEPS, NUM_ENVS), dtype=torch.float64)
    rollout = Rollout(
        *(nothing, torch.from_numpy(observations), torch.from_numpy(final)),
        *(nothing, nothing, nothing, nothing, torch.from_numpy(terminated), torch.from_numpy(truncated)),
    )
    expected = rollout_values(torchs, rollout, torch.from_numpy(last), state, chunk_size)
    inputs = CriticInputs(
        observations=jnp.asarray(observations),
        final_observations=jnp.asarray(final),
        last_observations=jnp.asarray(last),
        truncated=jnp.asarray(truncated),
        done=jnp.asarray(terminated | truncated),
    )
    measured = jax.jit(partial(jax_rollout_values, ours.critic, chunk_size=chunk_size))(
        weights.parameters["critic"], inputs, jnp.asarray(state.critic.numpy())
    )
    assert truncated.sum() > 4  # more than one pass of the smaller chunks
    assert_same(tuple(measured), tuple(expected))
