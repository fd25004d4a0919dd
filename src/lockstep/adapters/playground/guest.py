"""The envs of MuJoCo Playground, by the names of its registry. It and JAX are imported where an env is made."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import UsageError, in_one_line, nearest
from lockstep.core.source_names import listed_names, package_folder
from lockstep.core.types import ActionSpace

if TYPE_CHECKING:
    from lockstep.envs.config import PlaygroundConfig
    from lockstep.envs.jax_guest import JaxGuestTask

EPISODE_LENGTH = 1000  # of an env whose own config has none
_PACKAGE = "mujoco_playground"
_ROBOTS = ("locomotion", "manipulation")  # parts whose models are those of MuJoCo Menagerie


def check(env_id: str) -> None:
    """Raise UsageError if the registry's source does not list the env, or its robot's model is not on this machine.

    Playground would fetch MuJoCo Menagerie when it makes such an env: in the middle of a start, on every rank at once.
    """
    folder = package_folder(_PACKAGE)
    if folder is None:
        return
    parts = {part: _names(folder, part) for part in ("dm_control_suite", *_ROBOTS)}
    known = [name for names in parts.values() for name in names]
    if known and env_id not in known:
        raise UsageError(f"playground has no env {env_id!r}{nearest(env_id, known)} (known: {', '.join(known)})")
    menagerie = folder / "external_deps" / "mujoco_menagerie"
    if any(env_id in parts[part] for part in _ROBOTS) and not menagerie.exists():
        raise UsageError(
            f"playground/{env_id} needs the models of MuJoCo Menagerie, which are not in {menagerie}; fetch them with: "
            "python -c 'from mujoco_playground._src.mjx_env import ensure_menagerie_exists as get; get()'"
        )


def make_task(env_id: str, config: PlaygroundConfig) -> JaxGuestTask:
    """Return the env as a task; its time limit and repeats of an action are those of its own config, unless given.

    Raises:
        UsageError: Playground does not make it with these settings.
    """
    from lockstep.envs.jax_guest import BraxStyleGuest, JaxGuestTask
    from lockstep.sim.sealed import plain_precision

    with plain_precision():
        env, own = _make(env_id, config)
        action_repeat = config.action_repeat or int(own.get("action_repeat", 1))
        guest = BraxStyleGuest(env, action_repeat)
        return JaxGuestTask(
            guest,
            ActionSpace("continuous", int(env.action_size)),
            config.max_episode_steps or -(-int(own.get("episode_length", EPISODE_LENGTH)) // action_repeat),
            metric_terms=guest.metric_terms,
            step_duration_s=float(env.dt) * action_repeat,
        )


def _make(env_id: str, config: PlaygroundConfig) -> tuple[Any, Any]:
    """Return the env and its own config."""
    with contextlib.redirect_stdout(io.StringIO()):  # MJX says there what of Warp is not installed
        from mujoco_playground import registry

    from lockstep.sim.models import silence_mujoco

    silence_mujoco()
    try:
        own = registry.get_default_config(env_id)
        # Warp asks for room for contacts that nobody has counted, and is meant for GPUs; MJX's own code runs anywhere.
        overrides = ({"impl": "jax"} if "impl" in own else {}) | config.kwargs
        return registry.load(env_id, config=own, config_overrides=overrides), own
    except (AttributeError, KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(
            f"playground does not make {env_id!r} with env.kwargs {config.kwargs}: {in_one_line(error)}"
        ) from error


def _names(folder: Path, part: str) -> tuple[str, ...]:
    return listed_names(folder / "_src" / part / "__init__.py", "_envs")
