"""What may stand in ``config.library`` for rl_games: the content of ``params:`` in its configuration files.

- What has a name of lockstep's (the number of envs, the length of a rollout, the seed) must agree with it.
- What concerns rl_games' own runs (folders, names, when to save, players) is allowed and of no effect.
- What has no counterpart here, or does not work in rl_games 1.6.5 itself, is refused, and so is every unknown name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core.config import show
from lockstep.core.errors import UsageError
from lockstep.core.types import Task
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.learn.guest_settings import (
    FLAG,
    NOT_NEGATIVE,
    NOTHING,
    SHARE,
    TEXT,
    WIDTH,
    Allowed,
    Rules,
    count,
    either,
    number,
    one_of,
    require_known,
    require_unchanged,
    require_values,
    widths,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SECTIONS = ("algo", "model", "network", "config", "seed", "torch_threads", "load_checkpoint", "load_path")
"""Below ``params``."""

SETTINGS = _words(
    """
    bound_loss_type bounds_loss_coef central_value_config clip_actions clip_value critic_coef e_clip entropy_coef
    freeze_critic gamma grad_norm horizon_length kl_threshold learning_rate lr_schedule max_epochs mini_epochs
    minibatch_size minibatch_size_per_env mixed_precision normalize_advantage normalize_input normalize_value
    num_actors ppo reward_shaper schedule_entropy schedule_type seq_length tau torch_compile truncate_grads
    use_experimental_cv use_smooth_clamp value_bootstrap weight_decay zero_rnn_on_done
    """
)
"""Below ``params.config``: of effect here."""

BOOKKEEPING = _words(
    """
    bptt_length check_scores device device_name env_config env_name features full_experiment_name games_to_track
    is_train log_path multi_gpu name network_path player print_stats save_best_after save_frequency score_to_win
    train_dir use_diagnostics
    """
)
"""Below ``params.config``: about rl_games' own runs."""

REFUSED = {
    "epochs_between_resets": "breaks episodes off between iterations, which no metric here would show",
    "normalize_rms_advantage": "fails in rl_games 1.6.5 itself",
    "population_based_training": "is done by rl_games' own runs",
    "self_play": "needs envs of several agents",
    "self_play_config": "needs envs of several agents",
    "use_action_masks": "needs envs with action masks",
    "max_frames": "has a name of lockstep's; use --max_iterations",
    "max_steps": "has a name of lockstep's; use --max_iterations",
}
"""Below ``params.config``: what there is against it."""

CENTRAL_VALUE = _words(
    """
    clip_value e_clip freeze_critic grad_norm kl_threshold learning_rate lr_schedule mini_epochs minibatch_size
    minibatch_size_per_env mixed_precision model network normalize_input truncate_grads weight_decay
    """
)
"""Below ``params.config.central_value_config``."""

NETWORK = _words(
    """
    central_value cnn joint_obs_actions mlp name normalization rnn separate space value_activation
    """
)
"""Below ``params.network`` of the name actor_critic."""
_IDLE = {"network": _words("lstm rnn1 value_shape"), "mlp": _words("normalization regularizer"), "rnn": _words("")}
"""What stands in such a network, or in a part of it, in rl_games' own files, and is of no effect."""

_ACTIVATION = one_of("relu", "tanh", "sigmoid", "elu", "selu", "swish", "gelu", "softplus", "None")
_INITIALIZER: Rules = {
    "name": one_of(
        "const_initializer",
        "orthogonal_initializer",
        "glorot_normal_initializer",
        "glorot_uniform_initializer",
        "variance_scaling_initializer",
        "random_uniform_initializer",
        "kaiming_normal",
        "orthogonal",
        "default",
    ),
    "val": number(),
    "gain": number(),
    "scale": NOT_NEGATIVE,
}
_NETWORK: Rules = {
    "name": TEXT,
    "separate": FLAG,
    "central_value": FLAG,
    "value_activation": _ACTIVATION,
    "normalization": either(NOTHING, one_of("layer_norm", "batch_norm")),
    "mlp": {
        "units": widths(),
        "activation": _ACTIVATION,
        "initializer": _INITIALIZER,
        "d2rl": FLAG,
        "norm_only_first_layer": FLAG,
    },
    "rnn": {
        "name": one_of("lstm", "gru", "identity"),
        "units": WIDTH,
        "layers": count(1, 2**10),
        **dict.fromkeys(("before_mlp", "concat_input", "concat_output", "layer_norm"), FLAG),
    },
    "space": {
        "continuous": {
            "mu_activation": _ACTIVATION,
            "sigma_activation": _ACTIVATION,
            "mu_init": _INITIALIZER,
            "sigma_init": _INITIALIZER,
            "fixed_sigma": FLAG,
        },
    },
}
_SCHEDULES = ("adaptive", "linear", "constant", "identity", "none", "None", None)  # all but the first two are none
_NAMED: Rules = {"name": TEXT}
_OF_BOTH: Rules = {  # the agent's settings and the central value network's
    "learning_rate": NOT_NEGATIVE,
    "lr_schedule": Allowed("adaptive, linear or None", lambda value: value in _SCHEDULES),
    "kl_threshold": NOT_NEGATIVE,
    "mini_epochs": count(),
    "minibatch_size": count(),
    "minibatch_size_per_env": count(),
    "e_clip": NOT_NEGATIVE,
    "grad_norm": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    **dict.fromkeys(("clip_value", "freeze_critic", "mixed_precision", "normalize_input", "truncate_grads"), FLAG),
}
_FLAGS = _words(
    """
    clip_actions normalize_advantage normalize_value ppo schedule_entropy torch_compile use_experimental_cv
    use_smooth_clamp value_bootstrap zero_rnn_on_done
    """
)
_CONFIG: Rules = {
    **_OF_BOTH,
    **dict.fromkeys(_FLAGS, FLAG),
    "gamma": SHARE,
    "tau": SHARE,
    "critic_coef": NOT_NEGATIVE,
    "entropy_coef": number(),
    "bounds_loss_coef": either(NOTHING, number()),
    "bound_loss_type": one_of("bound", "regularisation", "none"),
    "schedule_type": one_of("legacy", "standard"),
    "seq_length": count(),
    "reward_shaper": {
        **dict.fromkeys(("scale_value", "shift_value", "min_val", "max_val"), number()),
        **dict.fromkeys(("log_val", "is_torch"), FLAG),
    },
}


def check_given(config: TrainConfig) -> None:
    """Check ``config.library`` by itself, and that ``config.agent`` has nothing that rl_games has no counterpart for.

    Raises:
        UsageError: a name that is unknown or refused, or a value that contradicts one of lockstep's own.
    """
    require_unchanged(config.agent, ["chunk_size"], "rl_games")
    given = config.library
    if set(given) == {"params"}:
        raise UsageError("library.params: leave 'params' out, and put what stands below it directly below library")
    require_known("library", given, SECTIONS, "rl_games")
    for name in ("algo", "model", "network", "config"):
        _mapping(f"library.{name}", given.get(name))
    settings = _mapping("library.config", given.get("config"))
    require_known("library.config", settings, SETTINGS | BOOKKEEPING | REFUSED.keys(), "rl_games")
    for name, reason in REFUSED.items():
        if settings.get(name) not in (None, False, 0, -1):
            raise UsageError(f"library.config.{name} {show(settings[name])} {reason}; leave it out")
    central = settings.get("central_value_config")
    if central is not False:
        central = _mapping("library.config.central_value_config", central)
        require_known("library.config.central_value_config", central, CENTRAL_VALUE, "rl_games")
        network = _mapping("library.config.central_value_config.network", central.get("network"))
        _require_known_network("library.config.central_value_config.network", network)
        require_values("library.config.central_value_config", central, {**_OF_BOTH, "network": _NETWORK})
    _require_known_network("library.network", _mapping("library.network", given.get("network")))
    without = {name: value for name, value in settings.items() if name != "central_value_config"}
    require_values("library.config", without, _CONFIG)
    for name, rules in (("network", _NETWORK), ("algo", _NAMED), ("model", _NAMED)):
        require_values("library", {name: given.get(name)}, {name: rules})
    _check_namesakes(config, given, settings)


def require_fit(params: Mapping[str, Any], config: TrainConfig, task: Task) -> None:
    """Check what rl_games is told in the end against the task and the rank's envs.

    Raises:
        UsageError: another algorithm or kind of actions, or minibatches that don't divide the samples.
    """
    continuous = task.action_space.kind == "continuous"
    algorithm = params["algo"].get("name")
    if algorithm != ("a2c_continuous" if continuous else "a2c_discrete"):
        raise UsageError(
            f"library.algo.name {show(algorithm)} does not fit: the actions of {config.task} are "
            f"{task.action_space.kind}; leave it out"
        )
    kind = "continuous" if continuous else "discrete"
    for other in params["network"].get("space", {}):
        if other != kind:
            raise UsageError(f"library.network.space has {other}, and the actions of {config.task} are {kind}")
    if params["config"]["clip_actions"] and task.action_space.limit == math.inf:
        raise UsageError(
            f"library.config.clip_actions scales actions to the bounds of an env, and those of {config.task} have "
            "none; leave it out"
        )
    if params["model"].get("name") == "continuous_a2c":
        raise UsageError("library.model.name continuous_a2c fails in rl_games 1.6.5 itself; use continuous_a2c_logstd")
    central = params["config"].get("central_value_config") or {}
    _require_whole_memory("library.network", params["network"])
    _require_whole_memory("library.config.central_value_config.network", central.get("network") or {})
    _numbers_of_mini_batches(params)


def _require_whole_memory(where: str, network: Mapping[str, Any]) -> None:
    """Check that a memory has what rl_games has no defaults for."""
    memory = network.get("rnn") or {}
    missing = [name for name in ("name", "units", "layers") if name not in memory]
    if "rnn" in network and missing:
        raise UsageError(f"{where}.rnn needs {', '.join(missing)} as well")


def require_envs(shares: Sequence[int]) -> None:
    """Raise UsageError if a rank has no envs, which rl_games can't deal with."""
    if 0 in shares:
        raise UsageError(
            f"rl_library rl_games needs envs on every rank, and rank {shares.index(0)} has none; use fewer ranks"
        )


def require_equal_numbers(by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError unless what every rank tells rl_games makes equally many minibatches."""
    first, *others = [_numbers_of_mini_batches(params) for params in by_rank]
    for numbers in others:
        for name, own in numbers.items():
            if own != first[name]:
                raise UsageError(
                    f"{name}.minibatch_size makes {first[name]} minibatches on one rank and {own} on another, which "
                    "must make equally many; use minibatch_size_per_env, or leave it out, for agent.num_mini_batches"
                )


def _numbers_of_mini_batches(params: Mapping[str, Any]) -> dict[str, int]:
    """Return by section how many minibatches an epoch has."""
    settings = params["config"]
    sections = {"library.config": settings}
    if "central_value_config" in settings:
        sections["library.config.central_value_config"] = settings["central_value_config"]
    num_envs = settings["num_actors"]
    return {name: _num_mini_batches(name, section, settings, num_envs) for name, section in sections.items()}


def _num_mini_batches(name: str, section: Mapping[str, Any], settings: Mapping[str, Any], num_envs: int) -> int:
    """Return how many minibatches an epoch has on a rank with so many envs."""
    horizon, length = settings["horizon_length"], settings["seq_length"]
    size = section.get("minibatch_size", num_envs * section.get("minibatch_size_per_env", 0))
    num_samples = horizon * num_envs
    if size < 1 or num_samples % size:
        raise UsageError(
            f"{name}.minibatch_size {size} does not divide the {num_samples} samples of {num_envs} envs x "
            f"{horizon} steps; leave it out, for agent.num_mini_batches"
        )
    if horizon % length or size % length:
        raise UsageError(
            f"library.config.seq_length {length} must divide agent.num_steps_per_env {horizon} and the {size} "
            "samples of a minibatch"
        )
    return int(num_samples // size)


def _check_namesakes(config: TrainConfig, given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    agent = config.agent_as(PpoConfig)
    namesakes = {
        "num_actors": ("--num_envs", config.num_envs),
        "horizon_length": ("--agent.num_steps_per_env", agent.num_steps_per_env),
        "max_epochs": ("--max_iterations", config.max_iterations),
    }
    wrong = [
        (f"config.{name} {show(settings[name])}", f"{flag} {settings[name]}")
        for name, (flag, value) in namesakes.items()
        if settings.get(name) not in (None, -1, value)
    ]
    if given.get("seed") not in (None, config.seed):
        wrong.append((f"seed {show(given['seed'])}", f"--seed {given['seed']}"))
    if wrong:
        raise UsageError(
            f"library has {', '.join(what for what, _ in wrong)}, for which lockstep has names of its own; use "
            f"{' '.join(flag for _, flag in wrong)}, or leave them out of library"
        )


def _require_known_network(where: str, network: Mapping[str, Any]) -> None:
    """Check the names of a network's settings, and of those of its parts; other networks have other ones."""
    if network.get("name", "actor_critic") != "actor_critic":
        return
    require_known(where, network, NETWORK | _IDLE["network"], "rl_games")
    for part in ("mlp", "rnn"):
        inner = _mapping(f"{where}.{part}", network.get(part))
        require_known(f"{where}.{part}", inner, _NETWORK[part].keys() | _IDLE[part], "rl_games")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping, not {show(value)}")
    return value
