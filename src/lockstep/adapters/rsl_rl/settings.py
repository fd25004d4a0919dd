"""What RSL-RL is told: ``agent`` in its words, and ``library`` laid over it, by the names of RSL-RL's own config."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rsl_rl.algorithms import PPO, Distillation
from rsl_rl.extensions import RandomNetworkDistillation, Symmetry
from rsl_rl.utils import resolve_callable, resolve_nn_activation
from torch import nn

from lockstep.core.config import combine, show
from lockstep.core.errors import UsageError
from lockstep.learn.agent_config import DistillationConfig
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.learn.guest_settings import (
    FLAG,
    MAPPING,
    NOT_NEGATIVE,
    NOTHING,
    SHARE,
    TEXT,
    TEXTS,
    WIDTH,
    Allowed,
    Rules,
    count,
    either,
    interval,
    number,
    one_of,
    require_known,
    require_unchanged,
    require_values,
    rules_of,
    widths,
)

Settings = dict[str, Any]

_ACTIVATIONS = {"silu": "swish"}  # the rest is called the same
_OURS = {
    "num_steps_per_env": "--agent.num_steps_per_env",
    "max_iterations": "--max_iterations",
    "seed": "--seed",
    "device": "--device",
    "save_interval": "--checkpoints.interval",
    "experiment_name": "--log_root",
    "run_name": "--run_name",
    "logger": "--logger",
}
_GIVEN = {"self", "actor", "critic", "student", "teacher", "storage", "device", "multi_gpu_cfg", "kwargs"}
"""What an algorithm is given by RSL-RL itself."""
_OF_A_MODEL = {"self", "obs", "obs_groups", "obs_set", "output_dim"}
_COMPILE_MODES = one_of("default", "max-autotune-no-cudagraphs")  # RSL-RL refuses those with CUDA graphs
STUDENT_STD = 0.1
"""Standard deviation of the student's actions while it learns; its means alone are trained."""


def settings_of(config: TrainConfig) -> Settings:
    """Return RSL-RL's config, complete but for the teacher; plain values alone.

    Raises:
        UsageError: a setting that RSL-RL has nothing for, or one of ``library`` that it does not know.
    """
    if config.dtype != "float32":
        more = "; --library.algorithm.use_mixed_precision true has its update use bfloat16" * (config.dtype[0] == "b")
        raise UsageError(f"dtype {config.dtype} is not available with rl_library rsl_rl; leave it at float32{more}")
    for name in ("actor_hidden_dims", "critic_hidden_dims"):
        if not getattr(config.agent, name):
            raise UsageError(f"agent.{name} [] is not available with rl_library rsl_rl; give it a hidden layer")
    is_ppo = isinstance(config.agent, PpoConfig)
    ours = _of_ppo(config.agent_as(PpoConfig)) if is_ppo else _of_distillation(config.agent_as(DistillationConfig))
    for name in config.library:
        if name in _OURS:
            raise UsageError(
                f"library.{name} {show(config.library[name])} is for lockstep to decide; use {_OURS[name]}"
            )
    settings = combine(ours | {"torch_compile_mode": None}, config.library)
    _check(settings, ours)
    _check_values(config, settings)
    for name in settings.keys() & {"actor", "critic", "student"}:
        settings[name] = _fit_class(f"library.{name}", settings[name], config.library.get(name) or {}, _OF_A_MODEL)
    return settings


def _of_ppo(agent: PpoConfig) -> Settings:
    require_unchanged(agent, ["chunk_size"], "rsl_rl")
    algorithm = {
        "class_name": "PPO",
        **{name: getattr(agent, name) for name in sorted(_parameters(PPO) - _GIVEN) if hasattr(agent, name)},
        "normalize_advantage_per_mini_batch": False,
        "rnd_cfg": None,
        "symmetry_cfg": None,
    }
    distribution = {"class_name": "GaussianDistribution", "init_std": agent.init_std, "std_type": "log"}
    return {
        "obs_groups": {"actor": ["actor"], "critic": ["critic"]},
        "actor": _model(agent, agent.actor_hidden_dims) | {"distribution_cfg": distribution},
        "critic": _model(agent, agent.critic_hidden_dims) | {"distribution_cfg": None},
        "algorithm": algorithm,
    }


def _of_distillation(agent: DistillationConfig) -> Settings:
    for name in ("gamma", "critic_hidden_dims"):
        value = getattr(agent, name)
        if value != type(agent).model_fields[name].default:
            raise UsageError(f"agent.{name} {show(value)} has no meaning for algorithm distillation; leave it out")
    num_steps = agent.num_learning_epochs * agent.num_steps_per_env
    if lost := num_steps % agent.gradient_length:
        fitting = [length for length in range(1, num_steps + 1) if num_steps % length == 0]
        closest = min(fitting, key=lambda length: abs(length - agent.gradient_length))
        raise UsageError(
            f"agent.gradient_length {agent.gradient_length} does not divide the {num_steps} env steps of an update, "
            f"of which the last {lost} would teach nothing; use {closest}"
        )
    names = [name for name in sorted(_parameters(Distillation) - _GIVEN) if hasattr(agent, name)]
    distribution = {"class_name": "GaussianDistribution", "init_std": STUDENT_STD, "std_type": "log"}
    return {
        "obs_groups": {"student": ["actor"]},
        "student": _model(agent, agent.actor_hidden_dims) | {"distribution_cfg": distribution | {"learn_std": False}},
        "algorithm": {"class_name": "Distillation"} | {name: getattr(agent, name) for name in names},
    }


def _model(agent: PpoConfig | DistillationConfig, hidden_dims: tuple[int, ...]) -> Settings:
    model: Settings = {
        "class_name": "MLPModel",
        "hidden_dims": list(hidden_dims),
        "activation": _ACTIVATIONS.get(agent.activation, agent.activation),
        "obs_normalization": agent.normalize_observations,
    }
    if agent.recurrent == "none":
        return model
    memory = {"rnn_type": agent.recurrent, "rnn_hidden_dim": agent.recurrent_hidden_dim, "rnn_num_layers": 1}
    return model | {"class_name": "RNNModel"} | memory


# --- checks ----------------------------------------------------------------------------------------------------------


def _check(settings: Settings, ours: Settings) -> None:
    require_known("library", settings, {*ours, "torch_compile_mode"}, "rsl_rl")
    for name, group in settings.items():
        if name != "torch_compile_mode" and not isinstance(group, Mapping):
            raise UsageError(f"library.{name} is a group of settings, not {show(group)}")
    algorithm = settings["algorithm"]
    own = ours["algorithm"]["class_name"]
    if algorithm["class_name"] != own:
        raise UsageError(
            f"library.algorithm.class_name {show(algorithm['class_name'])} is not available, for lockstep keeps the "
            f"ranks of {own} itself in step; leave it out, or bring a runner of your own (--runner)"
        )
    kind = PPO if own == "PPO" else Distillation
    known = {*_parameters(kind) - _GIVEN, "class_name", "share_cnn_encoders"}
    require_known("library.algorithm", algorithm, known, "rsl_rl")
    for name, extension, given in (
        ("rnd_cfg", RandomNetworkDistillation, {"self", "num_states", "obs_groups", "device"}),
        ("symmetry_cfg", Symmetry, {"self", "env"}),
    ):
        if algorithm.get(name) is not None:
            if not isinstance(algorithm[name], Mapping):
                raise UsageError(f"library.algorithm.{name} must be a mapping, not {show(algorithm[name])}")
            require_known(f"library.algorithm.{name}", algorithm[name], _parameters(extension) - given, "rsl_rl")
    if algorithm.get("rnd_cfg") is not None:
        if missing := [name for name in _NEEDED_BY_RND if name not in algorithm["rnd_cfg"]]:
            raise UsageError(f"library.algorithm.rnd_cfg needs {', '.join(missing)} as well")
        settings["obs_groups"] = {"rnd_state": ["actor"]} | settings["obs_groups"]


def _check_values(config: TrainConfig, settings: Settings) -> None:
    """Check what ``library`` sets, and that there are as many samples as minibatches."""
    models = dict.fromkeys(("actor", "critic", "student"), _OF_ANY_MODEL)
    kind = PPO if isinstance(config.agent, PpoConfig) else Distillation
    algorithm: Rules = {**rules_of(kind), **_OF_ALGORITHMS}
    if isinstance(config.agent, PpoConfig):
        num_envs = config.num_envs if isinstance(config.num_envs, int) else max(config.num_envs)
        has_memory = any("rnn_type" in settings[name] for name in ("actor", "critic"))
        most = num_envs if has_memory else num_envs * config.agent.num_steps_per_env
        words = f", as many as a rank has {'envs, whose memories are kept whole' if has_memory else 'samples'}"
        algorithm = {**algorithm, "num_mini_batches": count(1, most, words)}
    groups = dict.fromkeys(settings["obs_groups"], TEXTS)
    mode = either(NOTHING, _COMPILE_MODES)
    rules: Rules = {"algorithm": algorithm, "obs_groups": groups, "torch_compile_mode": mode, **models}
    require_values("library", config.library, rules)


def _is_activation(name: Any) -> bool:
    try:
        resolve_nn_activation(name)
    except (AttributeError, ValueError):
        return False
    return True


_ACTIVATION = Allowed("an activation of rsl_rl such as elu, relu, swish or tanh", _is_activation)
_DISTRIBUTION: Rules = {
    "class_name": TEXT,
    "init_std": number(1e-6, 1e6),
    "std_range": interval(1e-12, 1e9),
    "std_type": one_of("scalar", "log"),
    "learn_std": FLAG,
    "action_range": interval(),
}
_OF_ANY_MODEL: Rules = {
    "class_name": TEXT,
    "hidden_dims": widths(1),
    "activation": _ACTIVATION,
    "obs_normalization": FLAG,
    "distribution_cfg": _DISTRIBUTION,
    "rnn_type": one_of("gru", "lstm", any_case=True),
    "rnn_hidden_dim": WIDTH,
    "rnn_num_layers": count(1, 2**10),
}
_NEEDED_BY_RND = ("num_outputs", "predictor_hidden_dims", "target_hidden_dims", "weight")
_WIDTHS_OF_RND = widths(1, special=-1)  # as many as there are inputs
_OF_ALGORITHMS: Rules = {
    "class_name": TEXT,
    "gamma": SHARE,
    "lam": SHARE,
    "entropy_coef": number(),
    "desired_kl": either(NOTHING, NOT_NEGATIVE),
    "max_grad_norm": NOT_NEGATIVE,
    "schedule": one_of("adaptive", "fixed"),
    "optimizer": one_of("adam", "adamw", "sgd", "rmsprop", any_case=True),
    "loss_type": one_of("mse", "huber"),
    "share_cnn_encoders": FLAG,
    "rnd_cfg": {
        **rules_of(RandomNetworkDistillation),
        "num_outputs": WIDTH,
        "predictor_hidden_dims": _WIDTHS_OF_RND,
        "target_hidden_dims": _WIDTHS_OF_RND,
        "activation": _ACTIVATION,
        "weight_schedule": either(NOTHING, MAPPING),
    },
    "symmetry_cfg": rules_of(Symmetry),
}
"""Beside what the arguments of an algorithm's class say by their defaults."""


def _fit_class(name: str, settings: Settings, told: Mapping[str, Any], given: set[str]) -> Settings:
    """Return the settings of a class without those of ours that it does not take, where another one was ``told``."""
    if "class_name" not in settings:
        raise UsageError(f"{name} needs class_name as well")
    try:
        kind = resolve_callable(settings["class_name"])
    except Exception as error:  # other people's modules are imported, which may raise anything
        words = " ".join(str(error).split())
        raise UsageError(f"{name}.class_name {show(settings['class_name'])} can't be found: {words}") from error
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(f"{name}.class_name {show(settings['class_name'])} is no class of torch modules; name one")
    fitting = settings
    if not _takes_anything(kind):
        known = {*_parameters(kind) - given, "class_name"}
        fitting = {key: value for key, value in settings.items() if key in known or key in told}
        require_known(name, fitting, known, "rsl_rl")
    if fitting.get("distribution_cfg"):
        below = told.get("distribution_cfg") or {}
        own = fitting["distribution_cfg"]
        distribution = _fit_class(f"{name}.distribution_cfg", own, below, {"self", "output_dim"})
        fitting = fitting | {"distribution_cfg": distribution}
    return fitting


def _parameters(kind: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(kind).parameters)


def _takes_anything(kind: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(kind).parameters.values())
