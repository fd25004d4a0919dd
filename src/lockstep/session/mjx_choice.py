"""Which implementation of MJX steps physics: its own in JAX, or the kernels of MuJoCo Warp."""

import contextlib
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any

from lockstep.core.errors import UsageError
from lockstep.core.types import PureEngine


def make_mjx_engine(
    make: Callable[..., PureEngine], settings: dict[str, Any], *, platform: str, dtype: str
) -> PureEngine:
    """Return the engine mjx by the implementation that the settings ask for, or that fits best.

    Args:
        make: the engine, of ``implementation``, ``num_contacts`` and ``num_constraints``.
        settings: ``config.env.mjx``: these three, of which ``implementation`` may be ``auto``.
        platform: of the devices, as JAX calls it.
        dtype: of the physics.

    Raises:
        UsageError: ``warp`` was asked for and can't be used, or what ``make`` raises.
    """
    on_nvidia = platform != "cpu" and _has_cuda()
    obstacle = warp_obstacle(dtype, platform, on_nvidia, *warp_versions())
    *preferred, last = implementations(settings["implementation"], on_nvidia, obstacle)
    for implementation in preferred:
        with contextlib.suppress(UsageError):  # what Warp can't step MJX's own code may
            return make(**settings | {"implementation": implementation})
    return make(**settings | {"implementation": last})


def implementations(asked: str, on_nvidia: bool, obstacle: str | None) -> tuple[str, ...]:
    """Return those to be tried, ``jax`` and ``warp``, in order.

    Args:
        asked: one of them, or ``auto``: on NVIDIA GPUs ``warp`` if nothing is in its way, then ``jax``.
        on_nvidia: the devices are NVIDIA GPUs.
        obstacle: why ``warp`` can't be used, and the mend.

    Raises:
        UsageError: ``warp`` was asked for and can't be used.
    """
    if asked == "auto":
        return ("warp", "jax") if on_nvidia and obstacle is None else ("jax",)
    if asked == "warp" and obstacle is not None:
        raise UsageError(f"env.mjx.implementation warp can't be used: {obstacle}")
    return (asked,)


def warp_obstacle(dtype: str, platform: str, on_nvidia: bool, installed: str | None, needed: str | None) -> str | None:
    """Return why MJX can't use Warp, and the mend; None if it can.

    Args:
        dtype: of the physics.
        platform: of the devices, as JAX calls it. Warp's kernels run on CPUs too, where they are good for tests.
        on_nvidia: the devices are NVIDIA GPUs.
        installed: version of Warp that is installed, if any.
        needed: the one that MJX is made for, if it says so.
    """
    if dtype != "float32":
        return f"it computes in float32, not {dtype}; use --dtype float32 or --env.mjx.implementation jax"
    if platform != "cpu" and not on_nvidia:
        return f"it has no kernels for devices of the platform {platform}; use --env.mjx.implementation jax"
    if installed is None or needed not in (None, installed):
        found = "is not installed" if installed is None else f"is {installed} here, and MJX needs {needed}"
        return f"the package warp-lang {found}; install it with: pip install 'mujoco-mjx[warp]'"
    return None


def _has_cuda() -> bool:
    import jax

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:  # JAX has no such platform
        return False


def warp_versions() -> tuple[str | None, str | None]:
    """Return the version of Warp that is installed and the one that MJX is made for; None where there is none."""
    needed = None
    for requirement in importlib.metadata.requires("mujoco-mjx") or ():
        found = re.match(r"warp-lang\s*==\s*([^\s;,]+)", requirement)
        needed = found[1] if found else needed
    try:
        return importlib.metadata.version("warp-lang"), needed
    except importlib.metadata.PackageNotFoundError:
        return None, needed
