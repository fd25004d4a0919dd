"""RSL-RL's learners in one process: what they are told, that they are RSL-RL's, what they remember, that they learn."""

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.core.errors import UsageError

pytest.importorskip("rsl_rl", reason="needs RSL-RL: pip install 'lockstep-rl[rsl-rl]'")

from rsl_rl.models import MLPModel
from rsl_rl.runners import OnPolicyRunner

from lockstep.adapters.rsl_rl.env import RslRlEnv
from lockstep.adapters.rsl_rl.learner import RslRlLearner
from lockstep.adapters.rsl_rl.settings import settings_of
from lockstep.core.rng import stream_seed
from lockstep.distributed.torch_comm import SoloComm
from lockstep.recipes.catalog import make_task
from lockstep.session.deployed import deploy
from lockstep.session.make_env import build_share
from lockstep.session.torch_policy import TorchPolicy
from tests.unit.learner_fixtures import Recall, round_trip, toy_env
from tests.unit.rsl_rl_fixtures import MEMORY, config_with, equal_states, learner_on_line, training_of


def mirrored(env: Any, obs: Any = None, actions: Any = None) -> tuple[Any, Any]:
    """Return a cart-pole's observations and actions, then those seen in a mirror: RSL-RL asks for such a function."""
    if obs is not None:
        obs = torch.cat([obs, obs.apply(torch.neg)])
    return obs, None if actions is None else torch.cat([actions, -actions])


RND = {"num_outputs": 2, "predictor_hidden_dims": [4], "target_hidden_dims": [4], "weight": 1.0}
NORMALIZED_RND = RND | {"state_normalization": True, "reward_normalization": True}
DISTILLATION = {"algorithm": "distillation"}
SYMMETRY = {"data_augmentation_func": f"{__name__}:mirrored", "use_data_augmentation": True, "use_mirror_loss": True}


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_told_in_rsl_rls_words_with_the_librarys_own_on_top() -> None:
    agent = {"activation": "silu", "entropy_coef": 0.25, "init_std": 0.5, "normalize_observations": False} | MEMORY
    library = {"algorithm": {"optimizer": "sgd"}, "critic": {"hidden_dims": [3, 2]}, "torch_compile_mode": "default"}
    settings = settings_of(config_with(agent, library=library))
    recurrent = {"rnn_type": "gru", "rnn_hidden_dim": 8, "rnn_num_layers": 1, "class_name": "RNNModel"}
    model = recurrent | {"activation": "swish", "obs_normalization": False}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "log"}
    assert settings["actor"] == model | {"hidden_dims": [8], "distribution_cfg": gaussian}
    assert settings["critic"] == model | {"hidden_dims": [3, 2], "distribution_cfg": None}
    algorithm = settings["algorithm"]
    assert (algorithm["entropy_coef"], algorithm["optimizer"], algorithm["num_mini_batches"]) == (0.25, "sgd", 2)
    assert settings["torch_compile_mode"] == "default"


@pytest.mark.parametrize(
    ("told", "settings"),
    [
        ("dtype float64 is not available with rl_library rsl_rl", {"dtype": "float64"}),
        ("library.algorithm.use_mixed_precision", {"dtype": "bfloat16"}),
        ("agent.chunk_size 64 is not available with rl_library rsl_rl; leave it out", {"agent": {"chunk_size": 64}}),
        ("library.save_interval 5 is for lockstep to decide; use --ch", {"library": {"save_interval": 5}}),
        ("library.actr .* is no setting of rsl_rl; did you mean 'actor'", {"library": {"actr": {}}}),
        ("library.actor is a group of settings, not 3", {"library": {"actor": 3}}),
        ("library.actor.rnn_type 'gru' is no setting of rsl_rl", {"library": {"actor": {"rnn_type": "gru"}}}),
        ("library.algorithm.gama 0.9 .* did you mean 'gamma'", {"library": {"algorithm": {"gama": 0.9}}}),
        ("class_name 'MyPPO' is not available", {"library": {"algorithm": {"class_name": "MyPPO"}}}),
        ("library.critic.class_name 'Nothing' can't be found", {"library": {"critic": {"class_name": "Nothing"}}}),
        ("distribution_cfg.std 1 is no", {"library": {"actor": {"distribution_cfg": {"std": 1}}}}),
        ("rnd_cfg.wait 2 .*'weight'", {"library": {"algorithm": {"rnd_cfg": RND | {"wait": 2}}}}),
        ("agent.gamma 0.5 has no meaning", DISTILLATION | {"agent": {"gamma": 0.5}}),
        ("length 4 does not divide the 6 .* last 2 .*; use 3", DISTILLATION | {"agent": {"gradient_length": 4}}),
    ],
)
def test_what_rsl_rl_has_nothing_for_is_refused_by_name(told: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=told):
        settings_of(config_with(**settings))


def test_what_rsl_rl_itself_refuses_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"rsl_rl refuses what library says: Observation 'camera' .* not found"):
        training_of(config_with(library={"obs_groups": {"actor": ["camera"]}}))
    with pytest.raises(UsageError, match="no policy for discrete actions"):
        RslRlLearner(config_with(), toy_env(Recall(), 4, dtype=torch.float32), SoloComm())


class OwnModel(MLPModel):  # type: ignore[misc]
    """A user's own, which takes whatever RSL-RL's takes."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)


def test_a_model_of_the_users_own_is_told_all_that_rsl_rls_is() -> None:
    own, other = {"class_name": f"{__name__}:OwnModel"}, {"class_name": "MLPModel"}
    settings = settings_of(config_with(library={"actor": own}))
    assert settings["actor"] == settings_of(config_with())["actor"] | own
    training_of(config_with(library={"actor": own})).iterate()
    # Of a class that does not take it, nothing is told that the user has not asked for.
    assert "rnn_type" not in settings_of(config_with(MEMORY, library={"actor": other}))["actor"]


# --- the same as RSL-RL ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [{}, {"entropy_coef": 0.01, "use_clipped_value_loss": True}, MEMORY])
def test_alone_it_computes_what_rsl_rls_own_runner_does(agent: dict[str, Any]) -> None:
    # No time-outs, whose values are not the same; and a learning rate that can only fall: the divergence of a first
    # pass is 0 but for rounding, which would decide whether it rises.
    agent = {"learning_rate": 1e-2, "desired_kl": 1e-5} | agent
    config = config_with(agent, env={"max_episode_steps": 10_000})
    ours = training_of(config)
    for _ in range(3):
        ours.iterate()

    env = RslRlEnv(build_share(config, (8,), 0))
    told = settings_of(config) | {"num_steps_per_env": 6, "save_interval": 10}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(stream_seed(config.seed, "policy"))
        runner = OnPolicyRunner(env, told)
        for iteration in range(3):
            torch.manual_seed(stream_seed(config.seed, f"rsl_rl/iteration {iteration}/rank 0"))
            runner.learn(1)
    assert runner.alg.learning_rate != config.agent.learning_rate  # so it was steered
    assert ours.learner.algorithm.learning_rate == pytest.approx(runner.alg.learning_rate)  # type: ignore[attr-defined]
    for name, model in {"actor": runner.alg.actor, "critic": runner.alg.critic}.items():
        own = ours.learner.algorithm.models()[name].state_dict()  # type: ignore[attr-defined]
        assert own.keys() == model.state_dict().keys()
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(own[key], tensor, rtol=1e-4, atol=1e-5)


def test_a_time_out_is_bootstrapped_with_the_value_of_what_it_led_to() -> None:
    learner = learner_on_line({"init_std": 1e-6, "gamma": 0.5, "num_steps_per_env": 3})
    learner.collect()
    storage, critic = learner.algorithm.storage, learner.algorithm.critic
    moves = storage.actions[:, :, 0]
    # Before the third step an env was where its first two moves had brought it; the limit ended its episode after it.
    final = {"actor": moves.sum(0).unsqueeze(1)}
    ages, noise = torch.full((4, 1), 3.0), learner.env.observations["critic"][:, 3:]
    final["critic"] = torch.cat((final["actor"], moves[2].unsqueeze(1), ages, noise), dim=1)
    with torch.no_grad():
        expected = moves[2] + 1.0 + 0.5 * critic(final).squeeze(1)
    assert storage.dones[:, :, 0].tolist() == [[0] * 4, [0] * 4, [1] * 4]
    torch.testing.assert_close(storage.rewards[2, :, 0], expected)
    torch.testing.assert_close(storage.rewards[0, :, 0], moves[0] + 1.0)


def test_bounds_of_the_learning_rate_are_ours() -> None:
    learner = learner_on_line({"min_learning_rate": 9e-4, "max_learning_rate": 1.1e-3, "desired_kl": 1e-6})
    learner.collect()
    assert learner.update()["learning_rate"] == 9e-4


def test_advantages_are_left_as_they_are_if_asked() -> None:
    learner = learner_on_line({"normalize_advantages": False})
    learner.collect()
    raw = learner.algorithm.storage.advantages.clone()
    learner.update()
    assert learner.algorithm.storage.advantages.equal(raw)
    assert raw.mean().abs() > 0.1


def test_extensions_of_rsl_rl_take_part(capfd: pytest.CaptureFixture[str]) -> None:
    training = training_of(config_with(library={"algorithm": {"rnd_cfg": NORMALIZED_RND, "symmetry_cfg": SYMMETRY}}))
    for _ in range(2):
        metrics = training.iterate()
    assert {"loss/rnd", "loss/symmetry"} <= metrics.keys()
    rnd = training.learner.algorithm.rnd  # type: ignore[attr-defined]
    assert int(rnd.reward_normalizer.emp_norm.count) == int(rnd.state_normalizer.count) == 2 * 6 * 8
    state = round_trip(training.state_dict())
    resumed = training_of(training.config)
    resumed.load_state_dict(state, "model_2.pt")
    assert equal_states(training, resumed)
    assert resumed.learner.algorithm.rnd.update_counter == 12  # type: ignore[attr-defined]
    assert capfd.readouterr().out == ""


# --- the policy ------------------------------------------------------------------------------------------------------

_STATES = {"class_name": "HeteroscedasticGaussianDistribution", "std_type": "log"}
_BETA = {"class_name": "BetaDistribution"}


@pytest.mark.parametrize(
    ("agent", "distribution"),
    [
        ({}, {}),
        ({"normalize_observations": False}, {}),
        (MEMORY, {}),
        (MEMORY | {"recurrent": "lstm"}, {}),
        ({}, _STATES),
    ],
)
def test_the_policy_does_what_rsl_rls_own_does_played_loaded_and_deployed(
    agent: dict[str, Any], distribution: dict[str, Any]
) -> None:
    config = config_with(agent, library={"actor": {"distribution_cfg": distribution}} if distribution else {})
    training = training_of(config)
    training.iterate()
    loaded = RslRlLearner.load_policy(config, round_trip(training.state_dict())["state"], make_task(config))
    policy = TorchPolicy(config, 1, loaded.eval())
    deployed = deploy(policy)
    model = training.learner.algorithm.get_policy()  # type: ignore[attr-defined]
    memory, state = training.policy.initial_memory(3), loaded.initial_memory(3)
    model.reset()
    with torch.no_grad():
        for _ in range(3):
            observations = {"actor": torch.randn(3, 4)}
            expected = model(observations)
            before, during = model.get_hidden_state(), training.policy
            actions, memory = during.most_likely(observations, memory)
            assert model.get_hidden_state() is before  # what a rollout remembers is left alone
            torch.testing.assert_close(actions, expected)
            torch.testing.assert_close(policy(observations), expected)
            outputs = (
                deployed(observations["actor"], state) if agent.get("recurrent") else deployed(observations["actor"])
            )
            out, state = outputs if isinstance(outputs, tuple) else (outputs, state)
            torch.testing.assert_close(out, expected)


def test_what_can_not_be_exported_says_why() -> None:
    beta = training_of(config_with(library={"actor": {"distribution_cfg": _BETA}}))
    actions, _ = beta.policy.most_likely({"actor": torch.randn(5, 4)}, torch.zeros(0))
    assert actions.shape == (5, 1) and actions.abs().max() < 1
    with pytest.raises(UsageError, match="BetaDistribution can't be exported"):
        beta.policy.parts()
    seeing_all = training_of(config_with(library={"obs_groups": {"actor": ["critic"]}}))
    with pytest.raises(UsageError, match="groups critic can't be exported"):
        seeing_all.policy.parts()
    with pytest.raises(ValueError, match="'critic'"):
        seeing_all.policy.most_likely({"actor": torch.zeros(1, 4)}, torch.zeros(0))


# --- going on, and learning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [{}, MEMORY | {"recurrent": "lstm"}])
def test_a_resumed_training_goes_on_bit_for_bit(agent: dict[str, Any]) -> None:
    config = config_with(agent)
    through = training_of(config)
    for _ in range(2):
        through.iterate()
    state = round_trip(through.state_dict())
    resumed = training_of(config)
    resumed.load_state_dict(state, "model_2.pt")
    torch.rand(3)  # the generator is elsewhere
    assert equal_states(through, resumed)
    for training in (through, resumed):
        training.iterate()
    assert equal_states(through, resumed)


def test_a_training_goes_on_at_another_learning_rate() -> None:
    first = training_of(config_with())
    first.iterate()
    state = round_trip(first.state_dict())
    agent = {"learning_rate": 2e-4, "desired_kl": 1e3, "max_learning_rate": 2e-4}
    second = training_of(config_with(agent))
    second.load_state_dict(state, "model_1.pt")
    assert second.learner.algorithm.optimizer.param_groups[0]["lr"] == 2e-4  # type: ignore[attr-defined]
    assert second.iterate()["learning_rate"] == 2e-4
    own = training_of(config_with(agent, library={"algorithm": {"learning_rate": 3e-4}}))
    own.load_state_dict(state, "model_1.pt")
    then = first.learner.algorithm.learning_rate  # type: ignore[attr-defined]
    assert own.learner.algorithm.learning_rate == then  # type: ignore[attr-defined]


def test_weights_of_a_checkpoint_are_a_beginning_and_others_are_refused() -> None:
    trained = training_of(config_with())
    trained.iterate()
    state = round_trip(trained.state_dict())
    new = training_of(config_with())
    new.load_weights(state, "model_1.pt")
    mine, theirs = new.replicated_state(), trained.replicated_state()
    assert all(mine[name].equal(theirs[name]) for name in theirs if name.startswith(("actor", "critic")))
    assert new.learner.algorithm.optimizer.state_dict()["state"] == {}  # type: ignore[attr-defined]
    wider = training_of(config_with({"actor_hidden_dims": (9,)}))
    with pytest.raises(UsageError, match=r"checkpoint model_1\.pt does not fit agent\.\* .*size mismatch"):
        wider.load_weights(state, "model_1.pt")


def test_it_learns_prints_nothing_and_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    agent = {"actor_hidden_dims": (32,), "critic_hidden_dims": (32,), "num_steps_per_env": 16, "num_mini_batches": 4}
    training = training_of(config_with(agent | {"num_learning_epochs": 5}, num_envs=64))
    returns = [training.iterate()["mean_return"] for _ in range(20)]
    assert (returns[0] or 0) < 30
    assert (returns[-1] or 0) > 120
    assert capfd.readouterr() == ("", "")
    assert not [*Path().iterdir()]
