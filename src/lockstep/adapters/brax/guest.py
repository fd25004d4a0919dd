"""The envs of Brax, by the names that ``brax.envs`` has for them. Brax and JAX are imported where an env is made."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import UsageError, in_one_line, nearest
from lockstep.core.source_names import listed_names, package_folder
from lockstep.core.types import ActionSpace

if TYPE_CHECKING:
    from lockstep.envs.config import BraxConfig
    from lockstep.envs.jax_guest import JaxGuestTask

EPISODE_LENGTH = 1000  # in Brax's steps, as brax.envs.create has it


def check(env_id: str) -> None:
    """Raise UsageError if Brax's source lists its envs and this is none of them."""
    folder = package_folder("brax")
    known = listed_names(folder / "envs" / "__init__.py", "_envs") if folder else ()
    if known and env_id not in known:
        raise UsageError(f"brax has no env {env_id!r}{nearest(env_id, known)} (known: {', '.join(known)})")


def make_task(env_id: str, config: BraxConfig) -> JaxGuestTask:
    """Return the env as a task; its time limit is that of ``brax.envs.create``, 1000 of Brax's steps, unless given.

    Raises:
        UsageError: Brax does not make it with these settings.
    """
    from lockstep.envs.jax_guest import BraxStyleGuest, JaxGuestTask
    from lockstep.sim.sealed import plain_precision

    with plain_precision():
        env = _make(env_id, config)
        try:
            guest = BraxStyleGuest(env, config.action_repeat)
        except Exception as error:  # whatever an old library makes of a new JAX
            raise UsageError(f"brax/{env_id} does not work with the JAX that is here: {in_one_line(error)}") from error
        return JaxGuestTask(
            guest,
            ActionSpace("continuous", int(env.action_size)),
            config.max_episode_steps or -(-EPISODE_LENGTH // config.action_repeat),
            metric_terms=guest.metric_terms,
            step_duration_s=_step_seconds(env) * config.action_repeat,
        )


def _make(env_id: str, config: BraxConfig) -> Any:
    from brax import envs

    from lockstep.sim.models import silence_mujoco

    silence_mujoco()  # which finds some of Brax's models old-fashioned
    backend = {} if config.backend == "auto" else {"backend": config.backend}
    try:
        with warnings.catch_warnings():
            # Each time that it reads a model Brax says that it is no longer maintained.
            warnings.simplefilter("ignore", UserWarning)
            return envs.get_environment(env_id, **backend, **config.kwargs)
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(
            f"brax does not make {env_id!r} with env.backend {config.backend} and env.kwargs {config.kwargs}: "
            f"{in_one_line(error)}"
        ) from error


def _step_seconds(env: Any) -> float:
    try:
        return float(env.dt)
    except AttributeError:  # an env without a system, such as Brax's own toy
        return 0.0
