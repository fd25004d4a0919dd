"""What rl_games is told: ``config.agent`` in its words, its own configuration files over that, and what is refused."""

import inspect
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from rl_games.algos_torch import a2c_continuous, a2c_discrete, central_value
from rl_games.common import a2c_common

from lockstep.adapters.rl_games import given
from lockstep.adapters.rl_games.given import require_envs, require_equal_numbers
from lockstep.adapters.rl_games.settings import params_of
from lockstep.core.config import load_overlay
from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace
from lockstep.recipes.catalog import make_task
from tests.unit.learner_fixtures import Line, Recall
from tests.unit.rl_games_fixtures import config_with


def told(sees_more: bool = False, share: int | None = None, **settings: Any) -> dict[str, Any]:
    config = config_with(**settings)
    (num_envs,) = config.envs_by_rank(1)
    return params_of(config, make_task(config), share or num_envs, sees_more)


def test_the_agent_is_told_in_the_words_of_rl_games() -> None:
    agent = {"activation": "silu", "value_loss_coef": 0.5, "init_std": 1.0, "lam": 0.9, "num_mini_batches": 4}
    params = told(agent=agent | {"use_clipped_value_loss": True, "max_grad_norm": 2.0, "desired_kl": 0.02})
    assert params["algo"]["name"] == "a2c_continuous"
    network, config = params["network"], params["config"]
    assert network["separate"] and network["mlp"]["units"] == [8] and network["mlp"]["activation"] == "swish"
    assert network["space"]["continuous"]["sigma_init"] == {"name": "const_initializer", "val": 0.0}
    assert "rnn" not in network and "central_value_config" not in config
    expected = {
        "horizon_length": 6,
        "minibatch_size": 12,  # 8 envs x 6 steps in 4
        "critic_coef": 1.0,  # which rl_games halves
        "tau": 0.9,
        "clip_value": True,
        "grad_norm": 2.0,
        "truncate_grads": True,
        "lr_schedule": "adaptive",
        "kl_threshold": 0.02,
        "torch_compile": False,
        "multi_gpu": False,
    }
    assert {name: config[name] for name in expected} == expected


def test_a_critic_of_its_own_is_a_central_value_network() -> None:
    for params in (told(sees_more=True), told(agent={"critic_hidden_dims": (16,), "actor_hidden_dims": (8,)})):
        assert not params["network"]["separate"]
        assert params["config"]["central_value_config"]["network"]["central_value"]
    assert params["config"]["central_value_config"]["network"]["mlp"]["units"] == [16]
    assert params["network"]["mlp"]["units"] == [8]
    left_out = told(sees_more=True, library={"config": {"central_value_config": False}})
    assert left_out["network"]["separate"] and "central_value_config" not in left_out["config"]


def test_discrete_actions_and_a_memory() -> None:
    config = config_with(agent={"recurrent": "gru"})
    params = params_of(config, Recall(), 8, False)
    assert params["algo"]["name"] == "a2c_discrete" and params["model"]["name"] == "discrete_a2c"
    assert list(params["network"]["space"]) == ["discrete"]
    assert params["network"]["rnn"] == {"name": "gru", "units": 6, "layers": 1, "before_mlp": True}
    assert params["config"]["seq_length"] == 6


def test_settings_of_the_library_are_laid_over_and_outvote_lockstep_s() -> None:
    library = {"config": {"minibatch_size_per_env": 3, "bounds_loss_coef": 0.1, "gamma": 0.5}}
    params = told(library=library | {"network": {"mlp": {"units": [4, 4]}}})
    assert "minibatch_size" not in params["config"] and "bound_loss_type" not in params["config"]
    assert params["config"]["gamma"] == 0.5 and params["config"]["bounds_loss_coef"] == 0.1
    assert params["network"]["mlp"] == {"units": [4, 4], "activation": "elu", "initializer": {"name": "default"}}


def test_what_stands_in_a_file_of_rl_games_is_taken_as_it_is_once_the_flags_agree() -> None:
    library = load_overlay(str(files("rl_games").joinpath("configs/brax/ppo_ant.yaml")))
    with pytest.raises(UsageError, match=r"library\.params: leave 'params' out"):
        told(library=library)
    library = library["params"]
    with pytest.raises(UsageError) as refusal:
        told(library=library)
    flags = "--num_envs 4096 --agent.num_steps_per_env 8 --max_iterations 1000 --seed 7"
    assert flags in str(refusal.value)
    agreed: dict[str, Any] = {"num_envs": 4096, "max_iterations": 1000, "seed": 7, "agent": {"num_steps_per_env": 8}}
    params = told(library=library, **agreed)
    assert params["network"]["mlp"]["units"] == [256, 128, 64] and not params["network"]["separate"]
    assert params["config"]["minibatch_size"] == 32768 and params["config"]["use_smooth_clamp"]


def test_every_known_setting_is_one_that_rl_games_looks_up() -> None:
    source = "".join(inspect.getsource(module) for module in (a2c_common, a2c_continuous, a2c_discrete))
    looked_up = set(re.findall(r"config(?:\[|\.get\()'(\w+)'", source))
    looked_up |= set(re.findall(r"'(\w+)' in (?:self\.)?config", source))
    runner = Path(inspect.getfile(a2c_common)).parents[1] / "torch_runner.py"
    looked_up |= set(re.findall(r"\.get\('(\w+)'", runner.read_text()))
    assert given.SETTINGS - looked_up == set()
    # Three are handed over by code; seq_len is a name of old that rl_games itself ignores.
    from_code = {"env_info", "network", "seq_len", "vec_env"}
    assert looked_up >= from_code
    known = given.SETTINGS | given.BOOKKEEPING | given.REFUSED.keys() | from_code | {"adv_rms_momentum"}
    assert set(re.findall(r"config(?:\[|\.get\()'(\w+)'", source)) - known == set()
    of_critic = set(re.findall(r"config(?:\[|\.get\()'(\w+)'", inspect.getsource(central_value)))
    assert of_critic - given.CENTRAL_VALUE - {"device", "print_stats"} == set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "dtype float64 is not available with rl_library rl_games; use --dtype float32"),
        (
            {"library": {"config": {"gama": 0.9}}},
            "library.config.gama 0.9 is no setting of rl_games; did you mean 'gamma'?",
        ),
        ({"library": {"nets": {}}}, "library.nets {} is no setting of rl_games"),
        (
            {"library": {"config": {"central_value_config": {"units": 3}}}},
            "library.config.central_value_config.units 3 is no setting of rl_games",
        ),
        ({"library": {"config": {"normalize_rms_advantage": True}}}, "fails in rl_games 1.6.5 itself"),
        ({"agent": {"chunk_size": 64}}, "agent.chunk_size 64 is not available with rl_library rl_games; leave it out"),
        ({"library": {"algo": {"name": "sac"}}}, "library.algo.name 'sac' does not fit"),
        (
            {"library": {"network": {"space": {"discrete": None}}}},
            "has discrete, and the actions of ",
        ),
        (
            {"library": {"config": {"minibatch_size": 7}}},
            "minibatch_size 7 does not divide the 48 samples",
        ),
        ({"library": {"config": 3}}, "library.config must be a mapping, not 3"),
        ({"library": {"model": {"name": "continuous_a2c"}}}, "use continuous_a2c_logstd"),
    ],
)
def test_what_can_t_be_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        told(**settings)


class Unbounded(Line):
    """A point that moves by however much the action says."""

    action_space = ActionSpace("continuous", 1, limit=math.inf)


def test_actions_without_bounds_are_not_clipped() -> None:
    assert params_of(config_with(), Unbounded(), 8, False)["config"]["clip_actions"] is False
    with pytest.raises(UsageError, match=r"clip_actions scales actions to the bounds of an env, and those of cartpole"):
        params_of(config_with(library={"config": {"clip_actions": True}}), Unbounded(), 8, False)


def test_a_weight_of_the_value_loss_means_nothing_to_a_critic_with_an_optimizer_of_its_own() -> None:
    with pytest.raises(UsageError, match=r"agent.value_loss_coef 0.5 is not available"):
        told(sees_more=True, agent={"value_loss_coef": 0.5})


def test_ranks_must_have_envs_and_equally_many_minibatches() -> None:
    require_envs((64, 32))
    with pytest.raises(UsageError, match="rank 1 has none"):
        require_envs((64, 0))
    require_equal_numbers([told(share=8), told(share=4)])
    fixed: dict[str, Any] = {"library": {"config": {"minibatch_size": 24}}}
    with pytest.raises(UsageError, match="makes 2 minibatches on one rank and 1 on another"):
        require_equal_numbers([told(share=8, **fixed), told(share=4, **fixed)])
