"""Settings of skrl's agents: our words in the library's, of either framework. Imports neither torch nor jax.

Classes stand as their names (``"RunningStandardScaler"``); each framework looks up its own.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from lockstep.core.config import combine
from lockstep.core.errors import UsageError, nearest
from lockstep.core.types import ActionSpace
from lockstep.learn.agent_config import AgentConfig, PpoConfig, ReplayConfig, SacConfig
from lockstep.learn.config import TrainConfig
from lockstep.learn.guest_settings import (
    MAPPING,
    NOT_NEGATIVE,
    NOTHING,
    SHARE,
    TEXT,
    Allowed,
    Rules,
    count,
    either,
    like,
    number,
    require_unchanged,
    require_values,
)

OWN_POLICY = ("ppo", "rpo", "a2c", "trpo", "cem")
"""Algorithms that learn from what the policy of the moment has done; the others have a replay."""
_BOUNDED = ("sac", "td3", "ddpg")
_CONTINUOUS_ONLY = ("rpo", "trpo", *_BOUNDED)
_DISCRETE_ONLY = ("cem", "dqn", "ddqn")
WITHOUT_CRITIC = ("cem", "dqn", "ddqn")
"""Algorithms that look at no values of states."""
_WITHOUT_CLIPPING = ("cem", "dqn", "ddqn")
_NAMED_HERE = {
    "rollouts": "agent.num_steps_per_env",
    "batch_size": "agent.batch_size",
    "update_interval": "agent.num_updates",
    "learning_starts": "agent.learning_starts",
    "random_timesteps": "agent.learning_starts",
}
"""What has another name here alone, as more than the agent depends on it."""
_CLOSED = {
    "experiment": "the run directory has what the library would write",
    "mixed_precision": "the library is run in float32",
    "rewards_shaper": "it is a function; shape the task's reward instead",
}
SCALER = "RunningStandardScaler"
_SCHEDULE = "learning_rate_scheduler"
_STEERED = "KLAdaptiveLR"
_STEERING = ("kl_threshold", "min_lr", "max_lr", "kl_factor", "lr_factor")
"""Arguments of that one."""


def check_settings(config: TrainConfig, space: ActionSpace, shares: Sequence[int]) -> None:
    """Check that skrl has a counterpart of what a config asks for.

    Args:
        config: of the run.
        space: of the task's actions.
        shares: envs of each rank.

    Raises:
        UsageError: it has not; by the setting's name.
    """
    algorithm, agent = config.algorithm, config.agent
    if config.dtype != "float32":
        raise UsageError(f"dtype {config.dtype} is not available with rl_library skrl; use --dtype float32")
    wrong = _DISCRETE_ONLY if space.kind == "continuous" else _CONTINUOUS_ONLY
    if algorithm in wrong:
        raise UsageError(
            f"algorithm {algorithm} of rl_library skrl can't have {space.kind} actions, which task {config.task} has; "
            "use another one"
        )
    if algorithm in _BOUNDED and space.limit == inf:
        raise UsageError(
            f"algorithm {algorithm} of rl_library skrl chooses actions within bounds, and those of task {config.task} "
            "have none; use another one, such as ppo"
        )
    if isinstance(agent, PpoConfig):
        require_unchanged(agent, ("recurrent", "recurrent_hidden_dim", "normalize_advantages"), "skrl")
    if algorithm in WITHOUT_CRITIC:
        _refuse_changed(agent, "critic_hidden_dims", algorithm)
    if algorithm in _WITHOUT_CLIPPING:
        _refuse_changed(agent, "max_grad_norm", algorithm)
    if algorithm == "cem" and sum(shares) != 1:
        raise UsageError(
            f"algorithm cem of rl_library skrl keeps track of the episodes of one env, and there are {sum(shares)}; "
            "use --num_envs 1"
        )
    for rank, share in enumerate(shares):
        if not share:
            raise UsageError(f"rl_library skrl can't train on a rank without envs, as rank {rank} is; give it some")


def _refuse_changed(agent: AgentConfig, name: str, algorithm: str) -> None:
    value = getattr(agent, name)
    if value != type(agent)().model_dump()[name]:
        raise UsageError(f"agent.{name} {value} has no meaning for algorithm {algorithm} of rl_library skrl")


def agent_settings(
    config: TrainConfig, space: ActionSpace, shares: Sequence[int], rank: int, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of the agent's configuration class: our settings, and ``config.library`` over them.

    Args:
        config: of the run.
        space: of the task's actions.
        shares: envs of each rank.
        rank: whose configuration it is.
        known: the fields of that class and their defaults.

    Raises:
        UsageError: ``config.library`` has something that is unknown, of another type, or can't be on so many ranks.
    """
    settings = _TRANSLATIONS[config.algorithm](config, space, shares, rank)
    if config.agent.normalize_observations:
        settings |= {"observation_preprocessor": SCALER, "state_preprocessor": SCALER}
    _check_library(config, known, shares)
    if config.library.get(_SCHEDULE, settings.get(_SCHEDULE)) != settings.get(_SCHEDULE):
        settings.pop(f"{_SCHEDULE}_kwargs", None)  # another schedule has other ones
    return combine({name: value for name, value in settings.items() if name in known}, config.library)


def _check_library(config: TrainConfig, known: Mapping[str, Any], shares: Sequence[int]) -> None:
    for name in config.library:
        own_name = _NAMED_HERE.get(name, "")
        if own_name and hasattr(config.agent, own_name.removeprefix("agent.")):
            raise UsageError(f"library.{name} is {own_name} here; use --{own_name}")
        if name in _CLOSED:
            raise UsageError(f"library.{name} can't be set, as {_CLOSED[name]}; leave it out")
        if name not in known:
            raise UsageError(
                f"library.{name} is no setting of algorithm {config.algorithm} of skrl{nearest(name, known)}"
            )
    require_values("library", config.library, _rules(config, known, min(shares)))
    num_ranks = len(shares)
    if config.library.get("kl_threshold") and num_ranks > 1:
        raise UsageError(
            f"library.kl_threshold {config.library['kl_threshold']} ends an update by the samples of one rank, and "
            f"there are {num_ranks}, which would go on without each other; leave it out, or run one process"
        )


_NUM_OPTIMIZERS = {"sac": 3, **dict.fromkeys(("ppo", "rpo", "a2c", "td3", "ddpg"), 2)}
"""Of algorithms that may have a learning rate for each."""
_ARGUMENTS = Allowed(
    "a mapping, or a list of as many as there are optimizers",
    lambda value: all(map(MAPPING.accepts, value)) if isinstance(value, list | tuple) else MAPPING.accepts(value),
)
_SAID_IN_TEXT = ("mode", "threshold_mode", "scale_mode", "anneal_strategy")
"""Arguments of schedules that are no numbers."""
_STEPS = ("step_size", "T_0", "T_max")
"""Those that the time is divided by."""
_NO_TEXT = Allowed("a number, or what has numbers", lambda value: not isinstance(value, str))
_NAME = either(NOTHING, TEXT)
_VALUES: Rules = {
    **dict.fromkeys(("discount_factor", "gae_lambda", "polyak", "percentile"), SHARE),
    **dict.fromkeys(("grad_norm_clip", "kl_threshold"), NOT_NEGATIVE),
    f"{_SCHEDULE}_kwargs": either(NOTHING, _ARGUMENTS),
    "target_entropy": either(NOTHING, number()),
    "initial_entropy_value": number(1e-6, 1e6),
    **{f"{scaled}_preprocessor": _NAME for scaled in ("observation", "state", "value")},
    "exploration_noise": _NAME,
    "smooth_regularization_noise": _NAME,
}
"""Beside what the defaults of the fields of a configuration class say."""


def _rates(algorithm: str) -> Allowed:
    """Return what takes a learning rate, or one for each optimizer."""
    num = _NUM_OPTIMIZERS.get(algorithm)
    if num is None:
        return NOT_NEGATIVE
    several = Allowed(
        f"a list of {num}",
        lambda value: isinstance(value, list | tuple) and len(value) == num and all(map(NOT_NEGATIVE.accepts, value)),
    )
    return either(NOT_NEGATIVE, several)


def _of_schedule(name: str) -> Allowed:
    """Return what an argument of a schedule may be."""
    if name in _STEERING:
        return NOT_NEGATIVE
    if name in _STEPS:
        return count()
    return TEXT if name in _SAID_IN_TEXT else _NO_TEXT


def _rules(config: TrainConfig, known: Mapping[str, Any], num_envs: int) -> Rules:
    """Return what settings of an algorithm may be, where the rank with the fewest envs has so many.

    They are the same on all ranks, so that all refuse the same.
    """
    rules: dict[str, Any] = {**{name: like(default) for name, default in known.items()}, **_VALUES}
    of_classes = (name for name in known if name.endswith("_kwargs") and name != f"{_SCHEDULE}_kwargs")
    rules |= dict.fromkeys(of_classes, either(NOTHING, MAPPING))
    rules["learning_rate"] = _rates(config.algorithm)
    if isinstance(arguments := config.library.get(f"{_SCHEDULE}_kwargs"), Mapping):
        rules[f"{_SCHEDULE}_kwargs"] = {name: _of_schedule(name) for name in arguments}
    most = config.agent.num_steps_per_env * num_envs
    return rules | {"mini_batches": count(1, most, ", as many as a rank has samples")}


# --- by algorithm ----------------------------------------------------------------------------------------------------


def _on_policy(config: TrainConfig, space: ActionSpace, shares: Sequence[int], rank: int) -> dict[str, Any]:
    agent = config.agent
    return {
        "rollouts": agent.num_steps_per_env,
        "discount_factor": agent.gamma,
        "learning_rate": agent.learning_rate,
        "grad_norm_clip": agent.max_grad_norm,
        "time_limit_bootstrap": True,
    }


def _ppo(config: TrainConfig, space: ActionSpace, shares: Sequence[int], rank: int) -> dict[str, Any]:
    agent = config.agent_as(PpoConfig)
    steered = {
        _SCHEDULE: _STEERED,
        f"{_SCHEDULE}_kwargs": {
            "kl_threshold": agent.desired_kl,
            "min_lr": agent.min_learning_rate,
            "max_lr": agent.max_learning_rate,
        },
    }
    return {
        **_on_policy(config, space, shares, rank),
        "learning_epochs": agent.num_learning_epochs,
        "mini_batches": agent.num_mini_batches,
        "gae_lambda": agent.lam,
        "ratio_clip": agent.clip_param,
        "value_clip": agent.clip_param if agent.use_clipped_value_loss else 0.0,
        "value_loss_scale": agent.value_loss_coef,
        "entropy_loss_scale": agent.entropy_coef,
        **(steered if agent.schedule == "adaptive" else {}),
    }


def _replay(config: TrainConfig, space: ActionSpace, shares: Sequence[int], rank: int) -> dict[str, Any]:
    agent, total = config.agent_as(ReplayConfig), sum(shares)
    random_steps = agent.iterations_before_learning(total) * agent.num_steps_per_env
    return {
        "gradient_steps": agent.num_updates,
        "batch_size": agent.batch_size * shares[rank] // total,  # whole, as check_envs sees to
        "discount_factor": agent.gamma,
        "polyak": agent.polyak,
        "learning_rate": agent.learning_rate,
        "grad_norm_clip": agent.max_grad_norm,
        "random_timesteps": random_steps,
        "learning_starts": random_steps,
    }


def _sac(config: TrainConfig, space: ActionSpace, shares: Sequence[int], rank: int) -> dict[str, Any]:
    agent = config.agent_as(SacConfig)
    return {
        **_replay(config, space, shares, rank),
        "learning_rate": (agent.learning_rate, agent.learning_rate, agent.temperature_learning_rate),
        "learn_entropy": agent.tune_temperature,
        "initial_entropy_value": agent.init_temperature,
        "target_entropy": agent.target_entropy,
    }


def _exploring(config: TrainConfig, space: ActionSpace, shares: Sequence[int], rank: int) -> dict[str, Any]:
    """Return what deterministic policies need besides; noise and clip as Fujimoto et al. 2018 (arXiv:1802.09477)."""
    return {
        **_replay(config, space, shares, rank),
        "exploration_noise": "GaussianNoise",
        "exploration_noise_kwargs": {"mean": 0.0, "std": 0.1 * space.limit},
        "smooth_regularization_noise": "GaussianNoise",
        "smooth_regularization_noise_kwargs": {"mean": 0.0, "std": 0.2 * space.limit},
        "smooth_regularization_clip": 0.5 * space.limit,
    }


def _q_network(config: TrainConfig, space: ActionSpace, shares: Sequence[int], rank: int) -> dict[str, Any]:
    timesteps = config.max_iterations * config.agent.num_steps_per_env
    return {
        **_replay(config, space, shares, rank),
        "target_update_interval": 1,  # polyak is the share of each gradient step
        "exploration_scheduler": {"initial": 1.0, "final": 0.05, "timesteps": max(1, timesteps // 4)},
    }


_TRANSLATIONS: dict[str, Callable[[TrainConfig, ActionSpace, Sequence[int], int], dict[str, Any]]] = {
    "ppo": _ppo,
    "rpo": _ppo,
    "a2c": _on_policy,
    "trpo": _on_policy,
    "cem": _on_policy,
    "sac": _sac,
    "td3": _exploring,
    "ddpg": _exploring,
    "dqn": _q_network,
    "ddqn": _q_network,
}


def linear_schedule(described: object) -> Callable[[int, int], float]:
    """Return a function of the time step, and of how many there are, that goes from ``initial`` to ``final``.

    Args:
        described: ``initial``, ``final``, and in how many ``timesteps`` of each env.

    Raises:
        UsageError: these are not what it has.
    """
    names = ("initial", "final", "timesteps")
    if not isinstance(described, Mapping) or set(described) != set(names):
        raise UsageError(f"library.exploration_scheduler must have {', '.join(names)}, not {described!r}")
    try:
        initial, final, timesteps = (float(described[name]) for name in names)
    except (TypeError, ValueError):
        raise UsageError(f"library.exploration_scheduler must have three numbers, not {dict(described)}") from None

    def schedule(timestep: int, timesteps_in_all: int) -> float:
        share = min(1.0, timestep / timesteps) if timesteps > 0 else 1.0
        return initial + (final - initial) * share

    return schedule
