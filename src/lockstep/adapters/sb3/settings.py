"""What Stable-Baselines3 is told (stable-baselines3 2.9): ``config.agent`` in its words, ``config.library`` over that.

``library`` has the arguments of the algorithm's class (``n_epochs``, ``policy_kwargs``, ...), and ``vec_normalize``,
which has those of its ``VecNormalize``. ``policy_kwargs.activation_fn`` is the name of a class of ``torch.nn``, and
``action_noise`` the standard deviation of Gaussian noise, as a share of the action's limit.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from stable_baselines3 import PPO, SAC, TD3
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from lockstep.core.config import combine, show
from lockstep.core.errors import UsageError
from lockstep.core.types import Task
from lockstep.learn.agent_config import ReplayConfig
from lockstep.learn.config import PpoConfig, SacConfig, TrainConfig
from lockstep.learn.guest_settings import (
    MAPPING,
    NOT_NEGATIVE,
    NOTHING,
    SHARE,
    Allowed,
    Rules,
    count,
    either,
    number,
    one_of,
    require_known,
    require_unchanged,
    require_values,
    rules_of,
    widths,
)

_NAME = "Stable-Baselines3"
KINDS: dict[str, Any] = {"ppo": PPO, "sac": SAC, "td3": TD3}
_ACTIVATIONS = {"elu": "ELU", "relu": "ReLU", "tanh": "Tanh", "silu": "SiLU"}
_EXPLORATION = 0.1  # of TD3 (Fujimoto et al. 2018, arXiv:1802.09477, table 3); the library itself adds none

# Of ``library``: what lockstep has a name of its own for, and what no configuration file can hold.
_NAMESAKES = {"seed": "--seed", "device": "--device", "verbose": "", "tensorboard_log": "--logger"}
_OF_CODE = ("env", "policy", "replay_buffer_class", "rollout_buffer_class", "stats_window_size", "_init_setup_model")
# Of ``agent``, by algorithm: what the library has no counterpart for.
_WITHOUT = {
    "ppo": (
        *("recurrent", "recurrent_hidden_dim", "desired_kl", "min_learning_rate", "max_learning_rate", "chunk_size"),
    ),
    "sac": ("max_grad_norm",),
    "td3": ("max_grad_norm",),
}


@dataclass(frozen=True)
class Told:
    """What the library is told."""

    kind: Any
    """The algorithm's class."""
    arguments: dict[str, Any]
    """Of that class, but for the env."""
    vec_normalize: dict[str, Any] | None
    """Arguments of ``VecNormalize``; None for envs without it."""


def told(config: TrainConfig, task: Task, num_envs: int) -> Told:
    """Return what the library is told.

    Raises:
        UsageError: ``agent`` or ``library`` asks for what can't be; the setting is named.
    """
    if config.dtype != "float32":
        raise UsageError(f"dtype {config.dtype} is not available with rl_library sb3; use --dtype float32")
    algorithm = config.algorithm
    if algorithm != "ppo" and task.action_space.kind != "continuous":
        raise UsageError(
            f"algorithm {algorithm} of rl_library sb3 needs continuous actions, and {config.task} has discrete ones; "
            "use --algorithm ppo"
        )
    if algorithm != "ppo" and task.action_space.limit == math.inf:
        raise UsageError(
            f"algorithm {algorithm} of rl_library sb3 squashes actions to the bounds of an env, and those of "
            f"{config.task} have none; use --algorithm ppo"
        )
    _check_agent(config)
    kind, given = KINDS[algorithm], dict(config.library)
    normalize = given.pop("vec_normalize", None)
    _check_given(kind, given, algorithm)
    _check_values(kind, config, num_envs)
    arguments = combine(_own(config, num_envs), given)
    kwargs = arguments["policy_kwargs"]
    kwargs["activation_fn"] = _activation(kwargs["activation_fn"])
    if arguments.get("action_noise") is not None:
        zeros = np.zeros(task.action_space.size, dtype=np.float32)
        arguments["action_noise"] = NormalActionNoise(zeros, zeros + float(arguments["action_noise"]))
    if not (config.agent.normalize_observations or normalize):
        return Told(kind, arguments, None)
    base = {"norm_obs": config.agent.normalize_observations, "norm_reward": False, "gamma": config.agent.gamma}
    return Told(kind, arguments, combine(base, normalize or {}))


def _own(config: TrainConfig, num_envs: int) -> dict[str, Any]:
    agent = config.agent
    value = "vf" if isinstance(agent, PpoConfig) else "qf"
    arguments: dict[str, Any] = {
        "policy": "MlpPolicy",
        "learning_rate": agent.learning_rate,
        "gamma": agent.gamma,
        "policy_kwargs": {
            "net_arch": {"pi": list(agent.actor_hidden_dims), value: list(agent.critic_hidden_dims)},
            "activation_fn": _ACTIVATIONS[agent.activation],
        },
    }
    if isinstance(agent, PpoConfig):
        if agent.init_std != 1.0:
            arguments["policy_kwargs"] |= {"log_std_init": math.log(agent.init_std)}
        return arguments | _of_ppo(agent, num_envs)
    assert isinstance(agent, ReplayConfig)
    arguments |= {
        "train_freq": (agent.num_steps_per_env, "step"),
        "gradient_steps": agent.num_updates,
        "batch_size": agent.batch_size,
        "buffer_size": max(agent.replay_size, num_envs),
        "learning_starts": agent.learning_starts,
        "tau": agent.polyak,
    }
    if not isinstance(agent, SacConfig):
        return arguments | {"action_noise": _EXPLORATION}
    start = agent.init_temperature
    return arguments | {
        "ent_coef": f"auto_{start}" if agent.tune_temperature else start,
        "target_entropy": "auto" if agent.target_entropy is None else agent.target_entropy,
    }


def _of_ppo(agent: PpoConfig, num_envs: int) -> dict[str, Any]:
    return {
        "n_steps": agent.num_steps_per_env,
        "batch_size": agent.num_steps_per_env * num_envs // agent.num_mini_batches,
        "n_epochs": agent.num_learning_epochs,
        "gae_lambda": agent.lam,
        "clip_range": agent.clip_param,
        "clip_range_vf": agent.clip_param if agent.use_clipped_value_loss else None,
        "normalize_advantage": agent.normalize_advantages,
        "ent_coef": agent.entropy_coef,
        "vf_coef": agent.value_loss_coef,
        "max_grad_norm": agent.max_grad_norm,
    }


def _check_agent(config: TrainConfig) -> None:
    """Check that nothing is asked for that the library has not, as far as a recipe does not ask for it too."""
    agent = config.agent
    without = [*_WITHOUT[config.algorithm]]
    if isinstance(agent, SacConfig) and agent.temperature_learning_rate != agent.learning_rate:
        without.append("temperature_learning_rate")  # the library's temperature is learned at the rate of all else
    require_unchanged(agent, without, "sb3")


def left_out(config: TrainConfig, task: Task) -> list[str]:
    """Return, in words, what of a recipe the library can't follow."""
    agent, found = config.agent, []
    if isinstance(agent, PpoConfig) and agent.schedule != "fixed":
        rate = config.library.get("learning_rate", agent.learning_rate)
        found.append(f"its learning rate stays at {show(rate)}, whatever agent.schedule {agent.schedule} would make it")
    if task.num_observations["critic"] != task.num_observations["actor"]:
        found.append("its critic sees what the actor sees, and not the observations that the task has for critics")
    return found


def _check_given(kind: Any, given: Mapping[str, Any], algorithm: str) -> None:
    own_steps = "n_steps" if algorithm == "ppo" else "train_freq"
    namesakes = _NAMESAKES | {own_steps: "--agent.num_steps_per_env"}
    require_known("library", given, inspect.signature(kind).parameters.keys() - set(_OF_CODE), _NAME)
    for name in given:
        if name in namesakes:
            mend = f"use {namesakes[name]}" if namesakes[name] else "leave it out"
            raise UsageError(f"library.{name} {show(given[name])}: lockstep has a name of its own for it; {mend}")


def _check_values(kind: Any, config: TrainConfig, num_envs: int) -> None:
    """Check what ``library`` sets, by the signatures of the classes that it goes to."""
    agent, policy = config.agent, kind.policy_aliases["MlpPolicy"]
    rules: dict[str, Any] = {**rules_of(kind), **_VALUES, "vec_normalize": rules_of(VecNormalize) | {"gamma": SHARE}}
    if isinstance(agent, PpoConfig):
        num_samples = agent.num_steps_per_env * num_envs
        rules |= {"batch_size": count(2, num_samples, ", as many as there are samples"), "ent_coef": number()}
    of_policy = {**rules_of(policy), **_OF_POLICY}
    for name, owner in (("policy_kwargs", policy), ("vec_normalize", VecNormalize)):
        group = config.library.get(name)
        if isinstance(group, Mapping):
            known = inspect.signature(owner).parameters.keys() - _GIVEN
            require_known(f"library.{name}", group, known, _NAME)
            if isinstance(widths_by_name := group.get("net_arch"), Mapping):
                own = {"pi", "vf" if isinstance(agent, PpoConfig) else "qf"}
                require_known(f"library.{name}.net_arch", widths_by_name, own, _NAME)
                of_policy["net_arch"] = dict.fromkeys(own, widths())
    require_values("library", config.library, rules | {"policy_kwargs": of_policy})


def _is_auto(value: Any) -> bool:
    """Return whether a temperature is tuned, from a start that is a number above 0 if there is one."""
    if value == "auto":
        return True
    try:
        return isinstance(value, str) and value.startswith("auto_") and 0.0 < float(value[5:]) < math.inf
    except ValueError:
        return False


_GIVEN = {"venv", "observation_space", "action_space", "lr_schedule", "norm_obs_keys"}
"""Arguments of policies and of ``VecNormalize`` that the library gives, or that are for envs of other kinds."""
_CLASS = Allowed("left out, as no configuration can hold a class", lambda value: False)
_VALUES: Rules = {
    **dict.fromkeys(("gamma", "gae_lambda", "tau"), SHARE),
    **dict.fromkeys(("clip_range_vf", "target_kl", "action_noise"), either(NOTHING, NOT_NEGATIVE)),
    **dict.fromkeys(("rollout_buffer_kwargs", "replay_buffer_kwargs"), either(NOTHING, MAPPING)),
    "learning_starts": count(0),
    "sde_sample_freq": count(-1),
    "ent_coef": either(NOT_NEGATIVE, Allowed("auto or one such as auto_0.1", _is_auto)),
    "target_entropy": either(one_of("auto"), number()),
}
"""Beside what the arguments of an algorithm's class say by their defaults."""
_OF_POLICY: Rules = {
    **dict.fromkeys(("features_extractor_kwargs", "optimizer_kwargs"), either(NOTHING, MAPPING)),
    **dict.fromkeys(("features_extractor_class", "optimizer_class"), _CLASS),
    "net_arch": either(NOTHING, widths()),
    "log_std_init": number(-50, 50),
}
"""Beside what the arguments of a policy's class say by their defaults."""


def _activation(name: Any) -> type[nn.Module]:
    kind = getattr(nn, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(f"library.policy_kwargs.activation_fn {show(name)} is no class of torch.nn; use ELU or ReLU")
    return kind
