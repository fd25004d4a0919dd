"""Actor and critic: memories, sizes, initialisation and dtypes."""

from typing import cast

import pytest
import torch
from torch import nn

from lockstep.core.types import ActionSpace
from lockstep.learn.config import PpoConfig
from lockstep.learn.torch.distributions import Categorical, Gaussian
from lockstep.learn.torch.networks import ActorCritic, Memory
from lockstep.learn.torch.normalizer import Normalizer
from lockstep.learn.torch.statistics import Moments
from lockstep.learn.torch.training import make_policy
from tests.unit.learner_fixtures import Line, differences, make_training, small_config, toy_env

CONTINUOUS, DISCRETE = ActionSpace("continuous", 3), ActionSpace("discrete", 4)


def actor_critic(space: ActionSpace = CONTINUOUS, recurrent: str = "none") -> ActorCritic:
    torch.manual_seed(0)
    config = PpoConfig(
        actor_hidden_dims=(7,),
        critic_hidden_dims=(6, 5),
        recurrent=recurrent,
        recurrent_hidden_dim=4,
        init_std=0.5,
    )
    return ActorCritic(config, {"actor": 2, "critic": 9}, space)


@pytest.fixture(params=["gru", "lstm"])
def memory(request: pytest.FixtureRequest) -> Memory:
    torch.manual_seed(0)
    return Memory(request.param, 3, 5).double()


def test_steps_and_a_sequence_are_the_same(memory: Memory) -> None:
    inputs = torch.randn((9, 4, 3), dtype=torch.float64)
    start = torch.randn((memory.num_parts, 4, 5), dtype=torch.float64)
    done = torch.rand((9, 4)) < 0.3
    outputs, states = memory.sequence(inputs, start, done)
    assert outputs.shape == (9, 4, 5)
    assert states.shape == (9, memory.num_parts, 4, 5)
    state = start
    for step in range(9):
        output, state = memory.step(inputs[step], state)
        torch.testing.assert_close(output, outputs[step], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, states[step], rtol=1e-12, atol=1e-12)
        state = state.clone()
        state[:, done[step]] = 0.0
    assert done.any()


def test_what_the_memory_does_is_that_of_torchs_layer(memory: Memory) -> None:
    inputs = torch.randn((9, 4, 3), dtype=torch.float64)
    outputs, states = memory.sequence(inputs, memory.initial_state(4, inputs), torch.zeros((9, 4), dtype=torch.bool))
    expected, last = memory.layer(inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    parts = last if isinstance(last, tuple) else (last,)
    torch.testing.assert_close(states[-1], torch.cat(parts), rtol=1e-12, atol=1e-12)


def test_an_episode_knows_nothing_of_the_one_before(memory: Memory) -> None:
    inputs = torch.randn((8, 2, 3), dtype=torch.float64)
    start = memory.initial_state(2, inputs)
    done = torch.zeros((8, 2), dtype=torch.bool)
    done[4, 0] = True
    before, _ = memory.sequence(inputs, start, done)
    inputs[:5] += 1.0
    after, _ = memory.sequence(inputs, start + 1.0, done)
    assert torch.equal(after[5:, 0], before[5:, 0])
    # Where no episode ended, the change is remembered.
    assert (after[5:, 1] != before[5:, 1]).all()
    # What follows an end is what a new episode gives.
    fresh, _ = memory.sequence(inputs[5:], start, done[5:])
    torch.testing.assert_close(after[5:, 0], fresh[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
@pytest.mark.parametrize("space", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_actor_and_critic_see_groups_of_different_widths(space: ActionSpace, recurrent: str) -> None:
    policy = actor_critic(space, recurrent)
    state = policy.initial_state(11)
    parts = {"none": 0, "gru": 1, "lstm": 2}[recurrent]
    assert policy.recurrent == (recurrent != "none")
    for memory_state in state:
        assert memory_state.shape == (parts, 11, 4 if parts else 0)
    distribution, after = policy.act({"actor": torch.randn(11, 2)}, state.actor)
    assert isinstance(distribution, Gaussian if space.kind == "continuous" else Categorical)
    assert distribution.mode().shape == ((11, 3) if space.kind == "continuous" else (11,))
    assert after.shape == state.actor.shape
    done = torch.zeros((6, 11), dtype=torch.bool)
    sequence, values = policy.evaluate(torch.randn(6, 11, 2), torch.randn(6, 11, 9), state, done)
    assert values.shape == (6, 11)
    assert sequence.entropy().shape == (6, 11)
    (sequence.entropy().sum() + sequence.mode().sum() + values.sum()).backward()
    widths = [layer.out_features for layer in policy.actor.perceptron if isinstance(layer, nn.Linear)]
    assert widths == [7, space.size]
    widths = [layer.out_features for layer in policy.critic.perceptron if isinstance(layer, nn.Linear)]
    assert widths == [6, 5, 1]


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
def test_acting_step_by_step_is_what_the_update_evaluates(recurrent: str) -> None:
    policy = actor_critic(recurrent=recurrent)
    policy.cast_parameters_(torch.float64)
    observations = torch.randn((5, 3, 2), dtype=torch.float64)
    done = torch.tensor([[False, True, False]] * 5)
    start = policy.initial_state(3)
    together, _ = policy.evaluate(observations, torch.zeros((5, 3, 9), dtype=torch.float64), start, done)
    state = start.actor
    for step in range(5):
        distribution, state = policy.act({"actor": observations[step]}, state)
        torch.testing.assert_close(distribution.mode(), together.mode()[step], rtol=1e-12, atol=1e-12)
        state = state * (~done[step]).unsqueeze(-1)


def test_the_first_policy_is_centred_and_as_wide_as_asked() -> None:
    policy = actor_critic()
    distribution, _ = policy.act({"actor": torch.randn(100, 2)}, policy.initial_state(100).actor)
    assert distribution.mode().abs().max() < 0.1
    spread = distribution.sample(torch.ones(100, 3)) - distribution.mode()
    torch.testing.assert_close(spread, torch.full((100, 3), 0.5))
    choices, _ = actor_critic(DISCRETE).act({"actor": torch.randn(100, 2)}, policy.initial_state(100).actor)
    assert (choices.pack().exp() - 0.25).abs().max() < 0.05


def test_initialisation_follows_the_seed_alone() -> None:
    env = toy_env(Line(), 4)
    torch.manual_seed(11)
    first = make_policy(small_config(seed=5), env).state_dict()
    torch.manual_seed(12)
    torch.rand(3)
    before = torch.get_rng_state()
    again = make_policy(small_config(seed=5), env).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert differences(first, again) == []
    other = make_policy(small_config(seed=6), env).state_dict()
    assert ".actor.perceptron.0.weight" in differences(first, other)


def test_initialisation_is_the_same_in_every_dtype() -> None:
    single = make_policy(small_config(), toy_env(Line(), 4, dtype=torch.float32)).state_dict()
    double = make_policy(small_config(), toy_env(Line(), 4, dtype=torch.float64)).state_dict()
    assert differences({name: tensor.double() for name, tensor in single.items()}, double) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalizers_stay_in_double_precision(dtype: torch.dtype) -> None:
    policy = actor_critic()
    policy.cast_parameters_(dtype)
    policy.to("cpu")
    assert {parameter.dtype for parameter in policy.parameters()} == {dtype}
    assert {buffer.dtype for buffer in policy.buffers()} == {torch.float64}
    assert len(list(policy.buffers())) == 6
    cast(Normalizer, policy.actor_normalizer).merge_(Moments.of(torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    distribution, _ = policy.act({"actor": torch.ones((1, 2), dtype=dtype)}, policy.initial_state(1).actor)
    assert distribution.mode().dtype == dtype


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_bfloat16_is_autocast_alone(recurrent: str, kind: str) -> None:
    config = small_config(dtype="bfloat16", agent={"recurrent": recurrent}, env={"action_kind": kind})
    training = make_training(config)
    before = {name: parameter.detach().clone() for name, parameter in training.policy.named_parameters()}
    for _ in range(3):
        metrics = training.iterate()
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values() if value is not None)
    assert {parameter.dtype for parameter in training.policy.parameters()} == {torch.float32}
    assert training.learner.gradients.flat.dtype == torch.float32
    assert training.rollout.log_probs.dtype == training.rollout.rewards.dtype == torch.float32
    for name, parameter in training.policy.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    # It really ran in bfloat16: the distributions have no more than its 8 bits (Gaussian: the mean comes first).
    if kind == "continuous":
        means = training.rollout.distributions[..., 0]
        assert torch.equal(means.bfloat16().float(), means)
