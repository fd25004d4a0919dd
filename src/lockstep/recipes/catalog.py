"""The tasks there are: what each is called, where it lives, its recipe and its engines. Imports none of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import UsageError
from lockstep.core.registry import load
from lockstep.distributed.topology import require_distributed
from lockstep.envs.config import GuestConfig
from lockstep.recipes.entries import DEFAULT_ALGORITHM as DEFAULT_ALGORITHM
from lockstep.recipes.entries import TaskEntry as TaskEntry
from lockstep.recipes.libraries import (
    LIBRARIES,
    OWN,
    algorithms_of,
    check_algorithm_name,
    check_library,
    libraries_with,
    require_several,
)
from lockstep.recipes.task_registry import TaskRegistry

if TYPE_CHECKING:
    from lockstep.core.types import Task
    from lockstep.learn.config import TrainConfig
    from lockstep.recipes.suites import Suite


ALGORITHMS = algorithms_of(OWN)
"""What lockstep has a learner of its own for, by framework."""
_JAX_PACKAGES = ("jax", "flax", "optax", "orbax")
_JAX_ONLY = ("enable_multi_devices", "num_devices", "enable_jit")

TASKS = TaskRegistry("task")

for _entry in (
    TaskEntry(
        name="cartpole_classic",
        description="keep a pole up on a cart (Barto, Sutton, Anderson); --env.action_kind continuous or discrete",
        task="lockstep.tasks.cartpole_classic.task:CartpoleClassic",
        recipe="lockstep.recipes.cartpole:cartpole_classic",
        engines=("analytic",),
        other_recipes={"sac": "lockstep.recipes.cartpole_sac:cartpole_classic"},
    ),
    TaskEntry(
        name="cartpole_balance",
        description="keep a pole up on a cart that stays near the middle of its rail",
        task="lockstep.tasks.cartpole_balance.task:CartpoleBalance",
        recipe="lockstep.recipes.cartpole:cartpole_balance",
        engines=("mujoco",),
        other_recipes={"sac": "lockstep.recipes.cartpole_sac:cartpole_balance"},
    ),
    TaskEntry(
        name="cartpole_swingup",
        description="swing a hanging pole up by moving the cart, then keep it there",
        task="lockstep.tasks.cartpole_swingup.task:CartpoleSwingup",
        recipe="lockstep.recipes.cartpole:cartpole_swingup",
        engines=("mujoco",),
        other_recipes={"sac": "lockstep.recipes.cartpole_sac:cartpole_swingup"},
    ),
    TaskEntry(
        name="quadruped_velocity_flat",
        description="walk on four legs over flat ground as fast as commanded, with pushes and randomised robots",
        task="lockstep.tasks.quadruped_velocity_flat.task:QuadrupedVelocityFlat",
        recipe="lockstep.recipes.quadruped:quadruped_velocity_flat",
        engines=("mujoco",),
    ),
):
    TASKS.register(_entry.name, _entry)


def recipe_of(task: str, algorithm: str = DEFAULT_ALGORITHM, rl_library: str = OWN) -> TrainConfig:
    """Return the full config that a task is trained with by an algorithm.

    For another library's learner an algorithm without a recipe gets the task's first one, with the algorithm's own
    defaults; so does one that only other libraries have.

    Args:
        task: its name.
        algorithm: what learns.
        rl_library: whose learner it will be; the config does not yet say so.

    Raises:
        UsageError: an unknown task, or one that has no recipe for the algorithm.
    """
    entry = TASKS.get(task)
    recipes = entry.recipes
    check_algorithm_name(algorithm)
    if algorithm in recipes:
        return _in_framework_of(rl_library, _loaded_recipe(entry, algorithm), entry)
    from lockstep.learn.agent_config import AGENTS

    if algorithm in AGENTS and (rl_library != OWN or not _is_own(algorithm)):
        basis = _loaded_recipe(entry, DEFAULT_ALGORITHM)
        return basis.model_copy(update={"algorithm": algorithm, "agent": AGENTS[algorithm]()})
    frameworks = ALGORITHMS if entry.suite is None else (entry.suite.framework,)
    others = [name for name in libraries_with(algorithm, frameworks) if name != OWN]
    more = f" (it is with --rl_library {' or '.join(others)})" if others else ""
    raise UsageError(
        f"algorithm {algorithm!r} is not available{more}: task {task} has recipes for {', '.join(recipes)}"
    )


def _in_framework_of(rl_library: str, recipe: TrainConfig, entry: TaskEntry) -> TrainConfig:
    """Return a recipe for a library that is not ours: in the first framework that it has the algorithm for.

    The recipe itself goes by what lockstep's own learners have, as SAC in JAX alone.
    """
    if rl_library == OWN or entry.suite is not None or rl_library not in LIBRARIES:
        return recipe
    frameworks = [name for name, known in LIBRARIES.get(rl_library).algorithms.items() if recipe.algorithm in known]
    return recipe.model_copy(update={"ml_framework": frameworks[0]}) if frameworks else recipe


def _loaded_recipe(entry: TaskEntry, algorithm: str) -> TrainConfig:
    recipe: TrainConfig = load(entry.recipes[algorithm])(*entry.arguments)
    if recipe.task != entry.name:  # a copy of another's would train that
        raise UsageError(f"the recipe of task {entry.name} is for task {recipe.task!r}; give its config the name")
    return recipe


def _is_own(algorithm: str) -> bool:
    return any(algorithm in known for known in ALGORITHMS.values())


def engines_of(task: str, ml_framework: str, on_gpu: bool = False) -> tuple[str, ...]:
    """Return the engines that a task runs on, the default (``auto``) first.

    Args:
        task: its name.
        ml_framework: ``torch`` or ``jax``.
        on_gpu: whether the device is a GPU: there ``mjx`` comes before ``mujoco``, whose physics run on the CPU.
    """
    entry = TASKS.get(task)
    engines = entry.engines
    if ml_framework == "torch" or entry.suite is not None:
        return engines
    own = tuple(name for name in engines if name == "analytic")
    if "mujoco" not in engines:
        return own
    return (*own, "mjx", "mujoco") if on_gpu else (*own, "mujoco", "mjx")


def make_task(config: TrainConfig) -> Task:
    """Return the task that a config names, by its settings of the env.

    Raises:
        UsageError: an unknown task.
    """
    entry = TASKS.get(config.task)
    task: Task = load(entry.task)(*entry.arguments, config.env)
    return task


def note_of(config: TrainConfig) -> str:
    """Return what is to be said of a config's env before a training, in one line; "" for nothing."""
    suite = TASKS.get(config.task).suite
    note: str = load(suite.note)(config) if suite is not None and suite.note else ""
    return note


def require_model(config: TrainConfig) -> Path:
    """Return the MJCF file of the config's task.

    Raises:
        UsageError: the task has none, so there is nothing to be seen of it.
    """
    if TASKS.get(config.task).suite is not None:
        raise UsageError(
            f"task {config.task} is an env of another library, and films are of lockstep's own tasks; leave --video "
            "and --viewer out"
        )
    path = make_task(config).model_path
    if path is None:
        raise UsageError(
            f"task {config.task} has no MuJoCo model, so there is nothing of it to be seen; leave --video and --viewer "
            "out"
        )
    return path


def check_distributed(config: TrainConfig, world_size: int) -> None:
    """Raise UsageError if the config's task, or its library's algorithm, says that it can't train on several ranks."""
    require_several(config, world_size)
    require_distributed(load(TASKS.get(config.task).task), f"task {config.task}", world_size)


def check_processes(config: TrainConfig, num_processes: int) -> None:
    """Raise UsageError if what the config asks for can't be done by several processes."""
    if not config.enable_jit and num_processes > 1:
        raise UsageError(
            f"enable_jit False runs operation by operation in one process, and there are {num_processes}; start one "
            "with several devices (lockstep train --num_devices), or leave it on"
        )


def check_offered(config: TrainConfig) -> None:
    """Check that this version, and the config's task, have what the config names, and that it is installed.

    Raises:
        UsageError: no such framework, library, algorithm or engine, or a setting of another framework.
    """
    framework = config.ml_framework
    _check_suite(config)
    check_library(config)
    if framework == "torch" and config.engine in {*engines_of(config.task, "jax")} - {
        *engines_of(config.task, "torch")
    }:
        raise UsageError(f"engine {config.engine!r} is one of ml_framework jax; use --ml_framework jax")
    _require("engine", config.engine, ("auto", *engines_of(config.task, framework)), f"task {config.task}", framework)
    if framework == "torch":
        _check_no_jax_settings(config)
    else:
        _require_packages(framework)
    _check_mjx_settings(config)
    _check_video(config)


def _check_suite(config: TrainConfig) -> None:
    """Check what the env of a suite asks of the rest: its framework, no engine of ours, and that it can be made."""
    suite = TASKS.get(config.task).suite
    if suite is None:
        return
    _check_for_suite(config, suite)
    if config.ml_framework != suite.framework:
        raise UsageError(
            f"task {config.task} is for ml_framework {suite.framework}, not {config.ml_framework}; use --ml_framework "
            f"{suite.framework}"
        )
    if config.engine != "auto":
        raise UsageError(
            f"engine {config.engine!r} is not available: task {config.task} has physics of its own; leave --engine out"
        )
    if not isinstance(config.env, GuestConfig):
        raise UsageError(f"env of task {config.task} is a {type(config.env).__name__}; begin with the task's recipe")
    if suite.framework == "torch":  # to make one of JAX would occupy its devices before the processes have met
        make_task(config)


def _check_for_suite(config: TrainConfig, suite: Suite) -> None:
    """Refuse a library, or an algorithm of it, that is of no framework but those that the suite's envs are not for."""
    known = algorithms_of(config.rl_library)
    there = f"task {config.task} is for ml_framework {suite.framework}"
    if suite.framework not in known:
        others = libraries_with(config.algorithm, (suite.framework,))
        mend = f"--rl_library {' or '.join(others)}" if others else "another task"
        raise UsageError(f"{there}, which rl_library {config.rl_library} has no learners for; use {mend}")
    own = known[suite.framework]
    if config.algorithm not in own and any(config.algorithm in algorithms for algorithms in known.values()):
        raise UsageError(
            f"algorithm {config.algorithm!r} is not available: {there}, for which rl_library {config.rl_library} has "
            f"{', '.join(own)}"
        )


def _check_mjx_settings(config: TrainConfig) -> None:
    mjx = config.env.mjx
    for name, setting in type(mjx).model_fields.items():
        value = getattr(mjx, name)
        if value == setting.default:
            continue
        if config.engine != "mjx":
            with_jax = "" if config.ml_framework == "jax" else "--ml_framework jax "
            raise UsageError(
                f"env.mjx.{name} {value} is a setting of the engine mjx, and engine is {config.engine}; "
                f"use {with_jax}--engine mjx"
            )
        if name != "implementation" and mjx.implementation == "jax":
            raise UsageError(
                f"env.mjx.{name} {value} is a setting of implementation warp, and env.mjx.implementation is jax; "
                "leave one of them out"
            )


def _check_video(config: TrainConfig) -> None:
    if config.video and config.runner:
        raise UsageError(f"video is not available with runner {config.runner}; leave --video out")
    if config.video:
        require_model(config)


def _require(name: str, value: str, choices: tuple[str, ...], where: str, framework: str = "torch") -> None:
    if value not in choices:
        there = where if framework == "torch" else f"{where}, with ml_framework {framework},"
        raise UsageError(f"{name} {value!r} is not available: {there} has {', '.join(choices)}")


def _check_no_jax_settings(config: TrainConfig) -> None:
    for name in _JAX_ONLY:
        value = getattr(config, name)
        if value != type(config).model_fields[name].default:
            raise UsageError(
                f"{name} {value} is a setting of ml_framework jax; leave it out (with torch every device has a process "
                "of its own: lockstep train_multigpu --num_gpus N), or use --ml_framework jax"
            )


def _require_packages(framework: str) -> None:
    missing = [name for name in _JAX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"ml_framework {framework} needs {', '.join(missing)}, not installed here; install it with: pip install "
            "'lockstep-rl[jax]', or use --ml_framework torch"
        )
