"""What rl_games is told (rl-games 1.6.5): ``config.agent`` in its words, and ``config.library`` laid over that.

``library`` has the layout of what stands below ``params:`` in a configuration file of rl_games, so that such a file's
content can be put below ``library:`` in an overlay file as it is; ``given`` says what of it has a name of lockstep's.
"""

import copy
import math
from typing import Any

from lockstep.adapters.rl_games.given import check_given, require_fit
from lockstep.core.config import combine
from lockstep.core.errors import UsageError
from lockstep.core.types import Task
from lockstep.learn.config import PpoConfig, TrainConfig

Params = dict[str, Any]

_ACTIVATIONS = {"silu": "swish"}
_PLAIN = {"name": "default"}  # the initialisation that torch's layers have by themselves
_SEQUENCE_LENGTH = 4  # of rl_games, for a memory that ``library`` alone asks for


def params_of(config: TrainConfig, task: Task, num_envs: int, sees_more: bool) -> Params:
    """Return what stands below ``params`` in a configuration of rl_games.

    A critic that sees more than the actor, or has other widths, is what rl_games calls a central value network, with an
    optimizer of its own at a fixed learning rate; ``library.config.central_value_config: false`` leaves it out. Else
    actor and critic are two networks of one model (``separate: true``).

    ``kl_threshold`` is ``agent.desired_kl``, though rl_games compares it with the divergence from one pass over the
    rollout to the next, and not from the policy that made the rollout.

    Args:
        config: of the run.
        task: has the action space.
        num_envs: of this rank.
        sees_more: whether the critic's observations are others than the actor's.

    Raises:
        UsageError: ``agent`` or ``library`` asks for what can't be; the setting is named.
    """
    if config.dtype != "float32":
        raise UsageError(f"dtype {config.dtype} is not available with rl_library rl_games; use --dtype float32")
    check_given(config)
    given = copy.deepcopy(config.library)
    of_config = given.get("config") or {}
    central = of_config.pop("central_value_config", None)
    own = _own(config.agent_as(PpoConfig), task, num_envs, _has_central_value(config, sees_more))
    _make_way(own["config"], of_config)
    params = combine(own, given)
    settings = params["config"]
    if isinstance(central, dict):
        if "minibatch_size_per_env" in central:
            del settings["central_value_config"]["minibatch_size"]
        settings["central_value_config"] = combine(settings["central_value_config"], central)
    if not _has_memory(params):
        settings["seq_length"] = 1  # it must divide the samples all the same
    settings |= {
        "name": "lockstep",
        "env_name": config.task,
        "num_actors": num_envs,
        "max_epochs": config.max_iterations,  # where a linear schedule ends
        "multi_gpu": False,  # which would have rl_games make a process group
        "print_stats": False,
        "use_diagnostics": False,
    }
    require_fit(params, config, task)
    return params


def _has_memory(params: Params) -> bool:
    central = params["config"].get("central_value_config", {}).get("network", {})
    return "rnn" in params["network"] or "rnn" in central


def _has_central_value(config: TrainConfig, sees_more: bool) -> bool:
    """Return whether the critic is a central value network: as ``library`` says, else because it differs."""
    agent = config.agent
    asked = (config.library.get("config") or {}).get("central_value_config")
    if asked is None:
        return sees_more or agent.critic_hidden_dims != agent.actor_hidden_dims
    return asked is not False


def _own(agent: PpoConfig, task: Task, num_envs: int, has_central_value: bool) -> Params:
    """Return ``config.agent`` in the words of rl_games."""
    continuous = task.action_space.kind == "continuous"
    if not has_central_value and agent.critic_hidden_dims != agent.actor_hidden_dims:
        raise UsageError(
            f"agent.critic_hidden_dims {list(agent.critic_hidden_dims)} must be agent.actor_hidden_dims "
            f"{list(agent.actor_hidden_dims)} with library.config.central_value_config false"
        )
    network = _network(agent, agent.actor_hidden_dims)
    network |= {"separate": not has_central_value, "space": _space(agent) if continuous else {"discrete": {}}}
    settings = _settings(agent, num_envs)
    if has_central_value:
        if agent.value_loss_coef != 1.0:
            raise UsageError(
                f"agent.value_loss_coef {agent.value_loss_coef} is not available with rl_library rl_games where the "
                "critic has a network and an optimizer of its own; leave it out, or set "
                "library.config.central_value_config.learning_rate"
            )
        settings["central_value_config"] = _central_value(agent, settings)
    return {
        "algo": {"name": "a2c_continuous" if continuous else "a2c_discrete"},
        "model": {"name": "continuous_a2c_logstd" if continuous else "discrete_a2c"},
        "network": network,
        "config": settings,
    }


def _settings(agent: PpoConfig, num_envs: int) -> Params:
    return {
        "horizon_length": agent.num_steps_per_env,
        "minibatch_size": num_envs * agent.num_steps_per_env // agent.num_mini_batches,
        "mini_epochs": agent.num_learning_epochs,
        "learning_rate": agent.learning_rate,
        "lr_schedule": "adaptive" if agent.schedule == "adaptive" else "constant",
        "kl_threshold": agent.desired_kl,
        "gamma": agent.gamma,
        "tau": agent.lam,
        "e_clip": agent.clip_param,
        "clip_value": agent.use_clipped_value_loss,
        "critic_coef": 2.0 * agent.value_loss_coef,  # rl_games halves it
        "entropy_coef": agent.entropy_coef,
        "truncate_grads": True,
        "grad_norm": agent.max_grad_norm,
        "normalize_input": agent.normalize_observations,
        "normalize_value": True,  # else a critic whose learning rate nothing steers lags behind returns of a hundred
        "normalize_advantage": agent.normalize_advantages,
        "value_bootstrap": True,
        "seq_length": agent.num_steps_per_env if agent.recurrent != "none" else _SEQUENCE_LENGTH,
        "reward_shaper": {"scale_value": 1.0},
        "clip_actions": False,  # tasks do
        "bound_loss_type": "none",
        "bounds_loss_coef": 0.0,
        # Compiling takes as long as many iterations of networks as small as these; rl_games' own runner does it.
        "torch_compile": False,
    }


def _network(agent: PpoConfig, widths: tuple[int, ...]) -> Params:
    activation = _ACTIVATIONS.get(agent.activation, agent.activation)
    network: Params = {
        "name": "actor_critic",
        "mlp": {"units": list(widths), "activation": activation, "initializer": dict(_PLAIN)},
    }
    if agent.recurrent != "none":
        units = agent.recurrent_hidden_dim
        network["rnn"] = {"name": agent.recurrent, "units": units, "layers": 1, "before_mlp": True}
    return network


def _space(agent: PpoConfig) -> Params:
    spread = {"name": "const_initializer", "val": math.log(agent.init_std)}
    activations = {"mu_activation": "None", "sigma_activation": "None"}
    return {"continuous": activations | {"mu_init": dict(_PLAIN), "sigma_init": spread, "fixed_sigma": True}}


def _central_value(agent: PpoConfig, settings: Params) -> Params:
    alike = ("minibatch_size", "mini_epochs", "learning_rate", "clip_value", "e_clip", "truncate_grads", "grad_norm")
    return {name: settings[name] for name in (*alike, "normalize_input")} | {
        "network": _network(agent, agent.critic_hidden_dims) | {"central_value": True}
    }


def _make_way(own: Params, given: Params) -> None:
    """Take out of lockstep's settings what would outvote another one that is given."""
    if "minibatch_size_per_env" in given:
        own.pop("minibatch_size")
    if "bounds_loss_coef" in given:
        own.pop("bound_loss_type")
