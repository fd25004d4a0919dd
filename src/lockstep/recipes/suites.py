"""Suites of other people's envs: a task named ``<suite>/<id>`` is the env that its library calls ``<id>``.

Nothing of a library is imported before a task of its suite is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from lockstep.core.distributions import Distribution
from lockstep.core.registry import Registry, load
from lockstep.recipes.entries import TaskEntry

SEPARATOR = "/"


@dataclass(frozen=True)
class Suite:
    """The envs of a library, by import strings."""

    prefix: str
    description: str
    example: str
    """A task of it, prefix and all."""
    framework: str
    """The ml_framework that its envs are batched in."""
    distribution: Distribution
    check: str
    """Of a function ``(id) -> None`` that raises UsageError, with the nearest known id, if the library has no such env.

    The library is installed, in a version that will do, when it is called.
    """
    task: str
    """Of a function ``(id, config.env) -> envs.guest_task.GuestTask``: sizes of the env's spaces and the like.

    It raises UsageError for spaces that can't be served.
    """
    recipe: str
    """Of a function ``(id) -> TrainConfig`` whose ``env`` is an ``envs.config.GuestConfig``, for PPO."""
    make_env: str
    """Of what makes this process's envs of a config; ``session/make_env.py`` and ``jax_envs.py`` say how it is called.
    """
    other_recipes: Mapping[str, str] = field(default_factory=dict)
    """The same as ``recipe``, for each algorithm besides PPO."""
    note: str = ""
    """Of a function ``(config) -> str``: what a user should know of the env before a training, in one line, or ""."""
    saves_envs: bool = False
    """Whether checkpoints hold the envs as they are; else their episodes start anew where a run goes on."""


SUITES: Registry[Suite] = Registry("suite of envs")

for _suite in (
    Suite(
        prefix="gymnasium",
        description="every env that Gymnasium knows, by its id",
        example="gymnasium/HalfCheetah-v5",
        framework="torch",
        distribution=Distribution("gymnasium", "gymnasium", at_least="1.1"),
        check="lockstep.adapters.gymnasium.specs:check",
        task="lockstep.adapters.gymnasium.specs:make_task",
        recipe="lockstep.recipes.torch_guests:gymnasium",
        make_env="lockstep.adapters.gymnasium.guest:make_env",
        note="lockstep.recipes.torch_guests:time_limit_note",
    ),
    Suite(
        prefix="envpool",
        description="the envs of EnvPool, stepped in C++ threads",
        example="envpool/Ant-v4",
        framework="torch",
        distribution=Distribution("envpool", "envpool", at_least="1.1"),
        check="lockstep.adapters.envpool.specs:check",
        task="lockstep.adapters.envpool.specs:make_task",
        recipe="lockstep.recipes.torch_guests:envpool",
        make_env="lockstep.adapters.envpool.guest:make_env",
        note="lockstep.recipes.torch_guests:time_limit_note",
    ),
    Suite(
        prefix="brax",
        description="the envs of Brax",
        example="brax/ant",
        framework="jax",
        distribution=Distribution("brax", "brax", at_least="0.14.2"),
        check="lockstep.adapters.brax.guest:check",
        task="lockstep.adapters.brax.guest:make_task",
        recipe="lockstep.recipes.jax_guests:brax",
        make_env="lockstep.envs.jax_guest_env:JaxGuestEnv",
        other_recipes={"sac": "lockstep.recipes.jax_guests:brax_sac"},
        saves_envs=True,
    ),
    Suite(
        prefix="gymnax",
        description="the envs of gymnax",
        example="gymnax/CartPole-v1",
        framework="jax",
        distribution=Distribution("gymnax", "gymnax", at_least="1.0.1"),
        check="lockstep.adapters.gymnax.guest:check",
        task="lockstep.adapters.gymnax.guest:make_task",
        recipe="lockstep.recipes.jax_guests:gymnax",
        make_env="lockstep.envs.jax_guest_env:JaxGuestEnv",
        other_recipes={"sac": "lockstep.recipes.jax_guests:gymnax_sac"},
        saves_envs=True,
    ),
    Suite(
        prefix="playground",
        description="the envs of MuJoCo Playground",
        example="playground/CartpoleBalance",
        framework="jax",
        distribution=Distribution("playground", "playground", at_least="0.2"),
        check="lockstep.adapters.playground.guest:check",
        task="lockstep.adapters.playground.guest:make_task",
        recipe="lockstep.recipes.jax_guests:playground",
        make_env="lockstep.envs.jax_guest_env:JaxGuestEnv",
        other_recipes={"sac": "lockstep.recipes.jax_guests:playground_sac"},
        saves_envs=True,
    ),
):
    SUITES.register(_suite.prefix, _suite)


def suite_of(name: object) -> Suite | None:
    """Return the suite that a task's name begins with, whether or not it has such an env; None for other names."""
    prefix, separator, env_id = name.partition(SEPARATOR) if isinstance(name, str) else ("", "", "")
    return SUITES.get(prefix) if separator and env_id and prefix in SUITES else None


@cache
def guest_entry(name: str) -> TaskEntry:
    """Return the entry of a task whose name ``suite_of`` knows.

    Raises:
        UsageError: the library is missing or of a version that will not do, or it has no such env.
    """
    suite = suite_of(name)
    if suite is None:
        raise ValueError(f"{name!r} is not of the form <suite>/<id>")
    env_id = name.partition(SEPARATOR)[2]
    suite.distribution.require(f"task {name}")
    load(suite.check)(env_id)
    return TaskEntry(
        name=name,
        description=f"{env_id} of {suite.distribution.name}",
        task=suite.task,
        recipe=suite.recipe,
        engines=(suite.prefix,),
        other_recipes=suite.other_recipes,
        suite=suite,
        env_id=env_id,
    )
