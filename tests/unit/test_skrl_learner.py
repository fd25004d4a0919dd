"""skrl's agents with torch in one process: what they are told, that they are skrl's, what they remember, and learn."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.core.errors import UsageError

pytest.importorskip("skrl", reason="needs skrl: pip install 'lockstep-rl[skrl]'")

from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model

from lockstep.adapters.skrl.settings import check_settings
from lockstep.adapters.skrl.torch_learner import SkrlLearner
from lockstep.core.rng import stream_seed
from lockstep.core.types import ActionSpace
from lockstep.recipes.catalog import make_task
from lockstep.session.deployed import deploy
from lockstep.session.make_env import build_share
from lockstep.session.torch_policy import TorchPolicy
from tests.unit.skrl_fixtures import DISCRETE, config_with, training_of

CONTINUOUS = ("ppo", "rpo", "a2c", "trpo", "sac", "td3", "ddpg")
CHOOSING = ("ppo", "a2c", "dqn", "ddqn")
ALL = [{"algorithm": each} for each in CONTINUOUS] + [{"algorithm": each} | DISCRETE for each in CHOOSING]
NAMES = [f"{each['algorithm']}{'-discrete' if 'task' in each else ''}" for each in ALL]


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_told_in_skrls_words_with_the_librarys_own_on_top() -> None:
    agent = {"lam": 0.5, "gamma": 0.25, "entropy_coef": 0.125, "desired_kl": 0.03, "clip_param": 0.3}
    training = training_of(config_with(agent=agent, library={"gae_lambda": 0.75, "value_preprocessor": None}))
    told = training.learner.agent.cfg
    assert (told.gae_lambda, told.discount_factor, told.entropy_loss_scale) == (0.75, 0.25, 0.125)
    assert (told.ratio_clip, told.value_clip) == (0.3, 0.0)  # no clipped value loss, which 0 says
    assert (told.rollouts, told.learning_epochs, told.mini_batches) == (6, 2, 2)
    scheduler = training.learner.agent.scheduler
    assert (scheduler.kl_threshold, scheduler.min_lr, scheduler.max_lr) == (0.03, 1e-5, 1e-2)
    assert told.observation_preprocessor and told.state_preprocessor and not told.value_preprocessor


def test_a_schedule_of_the_librarys_own_is_told_nothing_of_ours() -> None:
    own = {"learning_rate_scheduler": "ExponentialLR", "learning_rate_scheduler_kwargs": {"gamma": 0.5}}
    agent = training_of(config_with(library=own)).learner.agent
    assert agent.cfg.learning_rate_scheduler_kwargs[0] == {"gamma": 0.5}
    # The same schedule with other numbers keeps those that nobody has named.
    named = {"learning_rate_scheduler": "KLAdaptiveLR", "learning_rate_scheduler_kwargs": {"min_lr": 1e-4}}
    scheduler = training_of(config_with(library=named, agent={"desired_kl": 0.03})).learner.agent.scheduler
    assert (scheduler.kl_threshold, scheduler.min_lr, scheduler.max_lr) == (0.03, 1e-4, 1e-2)


@pytest.mark.parametrize("algorithm", ["sac", "td3", "ddpg"])
def test_actions_without_bounds_are_refused_where_bounds_are_needed(algorithm: str) -> None:
    config = config_with(algorithm=algorithm)
    with pytest.raises(UsageError, match=f"algorithm {algorithm} of rl_library skrl chooses actions within bounds"):
        check_settings(config, ActionSpace("continuous", 2, math.inf), (8,))


def test_numbers_of_a_replay_are_told_by_env_step_of_each_env() -> None:
    training = training_of(
        config_with(algorithm="sac", agent={"temperature_learning_rate": 0.5, "learning_rate": 0.25, "polyak": 0.125})
    )
    told, memory = training.learner.agent.cfg, training.learner.agent.memory
    assert (told.batch_size, told.gradient_steps, told.polyak) == (24, 2, 0.125)
    assert told.learning_rate == (0.25, 0.25, 0.5)
    # 200 steps of 8 envs are 25 of each, which 5 iterations of 6 hold; 480 steps are 60 of each.
    assert told.learning_starts == told.random_timesteps == 30
    assert (memory.memory_size, memory.num_envs) == (60, 8)


@pytest.mark.parametrize(
    ("told", "settings"),
    [
        ("dtype float64 is not available with rl_library skrl", {"dtype": "float64"}),
        ("agent.recurrent gru is not available with rl_library skrl", {"agent": {"recurrent": "gru"}}),
        ("agent.normalize_advantages False is not available", {"agent": {"normalize_advantages": False}}),
        ("algorithm sac .* can't have discrete actions", {"algorithm": "sac"} | DISCRETE),
        ("algorithm dqn .* can't have continuous actions", {"algorithm": "dqn"}),
        ("agent.max_grad_norm 3.0 has no meaning", {"algorithm": "dqn", "agent": {"max_grad_norm": 3}} | DISCRETE),
        ("algorithm cem .* there are 8; use --num_envs 1", {"algorithm": "cem"} | DISCRETE),
        ("library.gae_lamda is no setting .* did you mean 'gae_lambda'", {"library": {"gae_lamda": 0.5}}),
        ("library.rollouts is agent.num_steps_per_env here", {"library": {"rollouts": 3}}),
        ("library.learning_starts is agent.learning_starts", {"algorithm": "sac", "library": {"learning_starts": 3}}),
        ("library.random_timesteps is agent.learning_starts", {"algorithm": "sac", "library": {"random_timesteps": 3}}),
        ("library.learning_starts is no setting of algorithm ppo", {"library": {"learning_starts": 3}}),
        ("library.experiment can't be set", {"library": {"experiment": {"wandb": True}}}),
        ("library.gae_lambda must be a number from 0 to 1, not 'high'", {"library": {"gae_lambda": "high"}}),
        ("library.time_limit_bootstrap must be true or false", {"library": {"time_limit_bootstrap": 1}}),
        ("library.value_preprocessor 'Scaler' is not known", {"library": {"value_preprocessor": "Scaler"}}),
        (
            "unexpected keyword argument 'clip'",
            {"library": {"observation_preprocessor_kwargs": {"clip": 1.0}}},
        ),
        (
            "must have initial, final, timesteps, not 0.5",
            {"algorithm": "dqn", "library": {"exploration_scheduler": 0.5}} | DISCRETE,
        ),
    ],
)
def test_what_skrl_has_nothing_for_is_refused_by_name(told: str, settings: dict[str, Any]) -> None:
    config = config_with(**settings)
    with pytest.raises(UsageError, match=told):
        training_of(config)


def test_random_actions_become_rare_as_the_schedule_says() -> None:
    described = {"initial": 1.0, "final": 0.5, "timesteps": 10}
    settings: dict[str, Any] = {"algorithm": "ddqn", "library": {"exploration_scheduler": described}} | DISCRETE
    schedule = training_of(config_with(**settings)).learner.agent.cfg.exploration_scheduler
    assert [schedule(step, 1000) for step in (0, 5, 10, 500)] == [1.0, 0.75, 0.5, 0.5]


# --- it is skrl's ----------------------------------------------------------------------------------------------------


class _Policy(GaussianMixin, Model):  # type: ignore[misc]
    def __init__(self, net: torch.nn.Module, **named: Any) -> None:
        Model.__init__(self, device="cpu", **named)
        GaussianMixin.__init__(self)
        self.net, self.log_std = net, torch.nn.Parameter(torch.zeros(1))

    def compute(self, inputs: Any, role: str = "") -> Any:
        return self.net(inputs["observations"]), {"log_std": self.log_std.expand(len(inputs["observations"]), 1)}


class _Value(DeterministicMixin, Model):  # type: ignore[misc]
    def __init__(self, net: torch.nn.Module, **named: Any) -> None:
        Model.__init__(self, device="cpu", **named)
        DeterministicMixin.__init__(self)
        self.net = net

    def compute(self, inputs: Any, role: str = "") -> Any:
        return self.net(inputs["states"]), {}


def test_an_update_is_that_of_skrls_agent_in_plain_code() -> None:
    """The same envs, seed and settings through skrl as its users write it give the same parameters, to rounding."""
    config = config_with(agent={"normalize_observations": False, "schedule": "fixed", "entropy_coef": 0.01})
    training = training_of(config)
    names = ("observation_space", "state_space", "action_space")
    named: dict[str, Any] = {name: getattr(training.learner.agent, name) for name in names}
    nets = {name: copy.deepcopy(training.learner.agent.models[name].layers) for name in ("policy", "value")}
    settings = PPO_CFG(
        rollouts=6,
        learning_epochs=2,
        mini_batches=2,
        discount_factor=0.99,
        gae_lambda=0.95,
        learning_rate=1e-3,
        grad_norm_clip=1.0,
        ratio_clip=0.2,
        value_clip=0.0,
        entropy_loss_scale=0.01,
        value_loss_scale=1.0,
        time_limit_bootstrap=True,
    )
    settings.experiment.write_interval = settings.experiment.checkpoint_interval = 0
    plain = PPO(
        models={"policy": _Policy(nets["policy"], **named), "value": _Value(nets["value"], **named)},
        memory=RandomMemory(memory_size=6, num_envs=8, device="cpu"),
        device="cpu",
        cfg=settings,
        **named,
    )
    plain.init()
    plain.enable_training_mode(True)
    env = build_share(config, (8,), 0)
    for iteration in range(2):
        torch.manual_seed(stream_seed(config.seed, f"skrl on rank 0 in iteration {iteration}"))
        for step in range(6 * iteration, 6 * (iteration + 1)):
            time = {"timestep": step, "timesteps": 360}
            before = env.observations
            with torch.no_grad():
                actions, _ = plain.act(before["actor"], before["critic"], **time)
                given = env.step(actions)
                ends = {"terminated": given.terminated.unsqueeze(1), "truncated": given.truncated.unsqueeze(1)}
                plain.record_transition(
                    observations=before["actor"],
                    states=before["critic"],
                    actions=actions,
                    rewards=given.reward.unsqueeze(1),
                    next_observations=given.final_observations["actor"],
                    next_states=given.final_observations["critic"],
                    infos={},
                    **ends,
                    **time,
                )
            plain.post_interaction(**time)
        training.iterate()
    for name in ("policy", "value"):
        ours = training.learner.agent.models[name].layers.state_dict()
        for path, tensor in nets[name].state_dict().items():
            torch.testing.assert_close(ours[path], tensor, rtol=1e-5, atol=1e-6, msg=f"{name}.{path}")


@pytest.mark.parametrize("settings", ALL, ids=NAMES)
def test_each_algorithm_trains_and_its_policy_is_the_librarys(settings: dict[str, Any]) -> None:
    config = config_with(**settings, agent={"learning_starts": 0} if _has_replay(settings) else {})
    training = training_of(config)
    before = {name: tensor.clone() for name, tensor in training.replicated_state().items()}
    for _ in range(3):
        metrics = training.iterate()
    agent = training.learner.agent
    changed = {name.partition(".")[0] for name, tensor in training.replicated_state().items()
               if name not in before or not tensor.equal(before[name])}  # fmt: skip
    assert set(agent.models) <= changed
    assert any(name.startswith("loss/") for name in metrics) and metrics["learning_rate"] > 0
    has_spread = settings["algorithm"] in ("ppo", "rpo", "a2c", "trpo") and "task" not in settings
    assert ("skrl/standard_deviation" in metrics) == has_spread
    observations = training.env.observations
    inputs = {"observations": agent.checkpoint_modules["observation_preprocessor"](observations["actor"])}
    actions, _ = training.policy.most_likely(observations, training.policy.initial_memory(8))
    torch.testing.assert_close(actions, _librarys_actions(agent, inputs), rtol=1e-6, atol=1e-6)
    state = training.learner.state_dict()
    loaded = SkrlLearner.load_policy(config, state, make_task(config))
    again, _ = loaded.most_likely(observations, loaded.initial_memory(8))
    torch.testing.assert_close(again, actions, rtol=1e-6, atol=1e-6)
    exported = deploy(TorchPolicy(config, 3, loaded))(observations["actor"])
    torch.testing.assert_close(exported, actions, rtol=1e-5, atol=1e-5)


def _has_replay(settings: dict[str, Any]) -> bool:
    return settings["algorithm"] in ("sac", "td3", "ddpg", "dqn", "ddqn")


def _librarys_actions(agent: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """Return what the library's own models say is to be done without noise."""
    with torch.no_grad():
        if "q_network" in agent.models:
            return agent.models["q_network"].act(inputs, role="q_network")[0].argmax(-1)
        actions, outputs = agent.models["policy"].act(inputs, role="policy")
        if "net_output" in outputs:
            return outputs["net_output"].argmax(-1)
        return outputs.get("mean_actions", actions)


def test_an_actions_likelihood_under_soft_actor_critic_is_that_of_the_squashed_gaussian() -> None:
    training = training_of(config_with(algorithm="sac"))
    policy = training.learner.agent.models["policy"]
    torch.manual_seed(0)
    observations = torch.randn(64, training.env.task.num_observations["actor"])
    actions, outputs = policy.act({"observations": observations}, role="policy")
    means, log_std = policy.layers(observations).chunk(2, -1)
    gaussian = torch.distributions.Normal(means, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(gaussian, [torch.distributions.TanhTransform()])
    torch.testing.assert_close(outputs["log_prob"], squashed.log_prob(actions), rtol=1e-3, atol=1e-3)


def test_random_actions_come_from_torchs_generator_and_fill_the_space() -> None:
    training = training_of(config_with(algorithm="td3"))
    policy = training.learner.agent.models["policy"]
    given = {"observations": torch.zeros(2000, 4)}
    torch.manual_seed(3)
    first, _ = policy.random_act(given, role="policy")
    torch.manual_seed(3)
    again, _ = policy.random_act(given, role="policy")
    assert first.equal(again) and first.shape == (2000, 1)
    assert -1.0 <= first.min() < -0.99 and 0.99 < first.max() <= 1.0


def test_an_actor_that_sees_less_than_the_critic_is_told_apart() -> None:
    training = training_of(config_with("quadruped_velocity_flat", num_envs=2, agent={"num_mini_batches": 1}))
    sizes = training.env.task.num_observations
    assert sizes["actor"] != sizes["critic"]
    models = training.learner.agent.models
    assert models["policy"].layers[0].in_features == sizes["actor"]
    assert models["value"].layers[0].in_features == sizes["critic"]
    training.iterate()
    scalers = training.learner.agent.checkpoint_modules
    assert scalers["state_preprocessor"].running_mean.shape == (sizes["critic"],)
    assert scalers["state_preprocessor"].current_count == 2 * 6


# --- saving and continuing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ALL, ids=NAMES)
def test_a_training_goes_on_bitwise(settings: dict[str, Any]) -> None:
    agent = {"learning_starts": 60, "replay_size": 8 * 12} if _has_replay(settings) else {}  # a replay that wraps
    config = config_with(**settings, agent=agent)
    whole = training_of(config)
    for _ in range(3):
        whole.iterate()
    content = copy.deepcopy(whole.state_dict())
    whole.iterate()
    resumed = training_of(config)
    resumed.load_state_dict(content, "model_3.pt")
    resumed.iterate()
    expected, found = whole.replicated_state(), resumed.replicated_state()
    assert expected.keys() == found.keys()
    assert [name for name in expected if not expected[name].equal(found[name])] == []


def test_a_learning_rate_that_was_changed_is_the_new_one_to_start_from() -> None:
    """A schedule goes on where it was; a new rate is where it begins anew. A fixed rate is that of the config."""
    exponential = {"learning_rate_scheduler": "ExponentialLR", "learning_rate_scheduler_kwargs": {"gamma": 0.5}}
    for changed in ({}, {"agent": {"schedule": "fixed"}}, {"library": exponential}):
        settings: dict[str, Any] = changed
        training = training_of(config_with(**settings))
        saved_rate = [training.iterate()["learning_rate"] for _ in range(2)][-1]
        content = training.state_dict()
        assert (saved_rate == 1e-3) == ("agent" in settings)
        unchanged = training_of(config_with(**settings))
        unchanged.load_state_dict(content, "model_2.pt")
        agent = unchanged.learner.agent
        assert agent.optimizer.param_groups[0]["lr"] == saved_rate
        raised = training_of(config_with(**(settings | {"agent": settings.get("agent", {}) | {"learning_rate": 5e-3}})))
        raised.load_state_dict(content, "model_2.pt")
        agent = raised.learner.agent
        assert agent.optimizer.param_groups[0]["lr"] == 5e-3
        assert agent.optimizer.state  # whose moments go on
        if agent.scheduler is not None:
            assert agent.scheduler.get_last_lr() == [5e-3]
        rate = raised.iterate()["learning_rate"]
        # 2 passes of the update take a step of the schedule each.
        assert {"ExponentialLR": rate == pytest.approx(5e-3 / 4)}.get(type(agent.scheduler).__name__, rate >= 5e-3 / 3)


def test_rates_of_soft_actor_critic_are_those_of_the_config() -> None:
    old = training_of(config_with(algorithm="sac")).state_dict()
    rates = {"learning_rate": 0.25, "temperature_learning_rate": 0.5}
    training = training_of(config_with(algorithm="sac", agent=rates))
    training.load_state_dict(old, "model_0.pt")
    agent = training.learner.agent
    optimizers = (agent.policy_optimizer, agent.critic_optimizer, agent.entropy_optimizer)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.25, 0.25, 0.5]


def test_a_replay_of_another_size_keeps_the_newest_steps_in_their_order() -> None:
    settings: dict[str, Any] = {"algorithm": "sac", "agent": {"replay_size": 8 * 12, "learning_starts": 0}}
    training = training_of(config_with(**settings))
    for _ in range(3):
        training.iterate()
    state = training.learner.state_dict()
    rows = state["replay"]["rows"]["rewards"]
    place = state["replay"]["place"]
    assert rows.shape == (8, 12, 1) and place == 6  # 18 steps went into 12 slots
    smaller = training_of(config_with(**(settings | {"agent": {"replay_size": 8 * 6, "learning_starts": 0}})))
    smaller.learner.load_state_dict(state)
    memory = smaller.learner.agent.memory
    assert (len(memory), memory.memory_index, memory.filled) == (48, 0, True)
    assert memory.tensors["rewards"].equal(rows[:, :6].transpose(0, 1))  # slots 0 to 5 were written last
    larger = training_of(config_with(**(settings | {"agent": {"replay_size": 8 * 24, "learning_starts": 0}})))
    larger.learner.load_state_dict(state)
    memory = larger.learner.agent.memory
    assert (len(memory), memory.memory_index, memory.filled) == (96, 12, False)
    assert memory.tensors["rewards"][:12].equal(torch.cat((rows[:, 6:], rows[:, :6]), 1).transpose(0, 1))


def test_a_new_run_begins_with_the_networks_and_normalisers_alone() -> None:
    config = config_with()
    old = training_of(config)
    old.iterate()
    new = training_of(config)
    new.load_weights(old.state_dict(), "model_1.pt")
    was, now = old.replicated_state(), new.replicated_state()
    begun = [name for name in now if name.startswith(("policy", "value", "observation_preprocessor"))]
    assert begun and all(was[name].equal(now[name]) for name in begun)
    assert not new.learner.agent.optimizer.state and now["counters.timestep"] == 0


def test_a_run_is_quiet_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    training = training_of(config_with())
    training.iterate()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


# --- learning --------------------------------------------------------------------------------------------------------


def test_skrls_ppo_learns_to_keep_a_pole_up() -> None:
    agent = {"actor_hidden_dims": (32,), "critic_hidden_dims": (32,), "num_steps_per_env": 16, "num_learning_epochs": 4}
    training = training_of(config_with("cartpole_classic", num_envs=64, agent=agent))
    returns = [training.iterate()["mean_return"] for _ in range(25)]
    first, *_, last = [each for each in returns if each is not None]  # an iteration may end no episode
    assert first < 40 and last > 100


def test_cem_learns_from_the_best_episodes_of_one_env() -> None:
    settings: dict[str, Any] = {"algorithm": "cem", "num_envs": 1, "agent": {"num_steps_per_env": 200}}
    training = training_of(config_with(**(settings | DISCRETE)))
    before = training.learner.agent.models["policy"].layers[0].weight.clone()
    metrics = training.iterate()
    assert metrics["loss/policy"] > 0 and metrics["skrl/return_threshold"] > 0
    assert not before.equal(training.learner.agent.models["policy"].layers[0].weight)
