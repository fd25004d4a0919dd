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
from lockstep.learn.guest_settings import require_known, require_unchanged


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
    _numbers_of_mini_batches(params)


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
        for name, number in numbers.items():
            if number != first[name]:
                raise UsageError(
                    f"{name}.minibatch_size makes {first[name]} minibatches on one rank and {number} on another, which "
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


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping, not {show(value)}")
    return value
