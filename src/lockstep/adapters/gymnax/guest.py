"""The envs of gymnax, by its ids. gymnax is imported where an env is made, since its import occupies JAX's devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.errors import UsageError, nearest
from lockstep.core.source_names import listed_names, package_folder

if TYPE_CHECKING:
    from lockstep.envs.config import JaxGuestConfig
    from lockstep.envs.jax_guest import JaxGuestTask


def check(env_id: str) -> None:
    """Raise UsageError if gymnax's source lists its envs and this is none of them."""
    folder = package_folder("gymnax")
    known = listed_names(folder / "registration.py", "_BUILTIN_ENV_IDS") if folder else ()
    if known and env_id not in known:
        raise UsageError(f"gymnax has no env {env_id!r}{nearest(env_id, known)} (known: {', '.join(known)})")


def make_task(env_id: str, config: JaxGuestConfig) -> JaxGuestTask:
    """Return the env as a task; see ``world.make_task``."""
    from lockstep.adapters.gymnax import world

    return world.make_task(env_id, config)
