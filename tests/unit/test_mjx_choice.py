"""Which implementation of the engine mjx is taken, and what is said where Warp can't be."""

from typing import Any

import pytest

from lockstep.core.errors import UsageError
from lockstep.recipes.catalog import check_offered
from lockstep.session import mjx_choice
from lockstep.session.make_config import make_config
from lockstep.session.mjx_choice import implementations, make_mjx_engine, warp_obstacle

SETTINGS = {"implementation": "auto", "num_contacts": 3, "num_constraints": 5}


@pytest.mark.parametrize(
    ("asked", "on_nvidia", "obstacle", "expected"),
    [
        ("auto", True, None, ("warp", "jax")),
        ("auto", True, "it is ill", ("jax",)),
        ("auto", False, None, ("jax",)),
        ("jax", True, None, ("jax",)),
        ("warp", True, None, ("warp",)),
        ("warp", False, None, ("warp",)),
    ],
)
def test_warp_is_taken_on_nvidia_gpus_and_where_it_is_asked_for(
    asked: str, on_nvidia: bool, obstacle: str | None, expected: tuple[str, ...]
) -> None:
    assert implementations(asked, on_nvidia, obstacle) == expected


def test_warp_where_it_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^env.mjx.implementation warp can't be used: it is ill$"):
        implementations("warp", True, "it is ill")


@pytest.mark.parametrize(
    ("dtype", "platform", "on_nvidia", "installed", "message"),
    [
        ("float32", "gpu", True, "1.18.0", None),
        ("float32", "cpu", False, "1.18.0", None),
        ("float64", "gpu", True, "1.18.0", "it computes in float32, not float64; use --dtype float32 or "),
        ("float32", "gpu", False, "1.18.0", "it has no kernels for devices of the platform gpu; use "),
        ("float32", "gpu", True, None, "warp-lang is not installed; install it with: pip install 'mujoco-mjx[warp]'"),
        ("float32", "gpu", True, "1.19.0", "warp-lang is 1.19.0 here, and MJX needs 1.18.0; install it with: pip"),
    ],
)
def test_what_is_in_the_way_of_warp(
    dtype: str, platform: str, on_nvidia: bool, installed: str | None, message: str | None
) -> None:
    obstacle = warp_obstacle(dtype, platform, on_nvidia, installed, "1.18.0")
    assert (obstacle is None) == (message is None)
    assert (message or "") in (obstacle or "")
    assert "\n" not in (obstacle or "")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with an NVIDIA GPU and the right Warp."""
    monkeypatch.setattr(mjx_choice, "_has_cuda", lambda: True)
    monkeypatch.setattr(mjx_choice, "warp_versions", lambda: ("1.18.0", "1.18.0"))


class Maker:
    """Makes engines that are no more than what they were asked to be."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused

    def __call__(self, **settings: Any) -> Any:
        if settings["implementation"] == self.refused:
            raise UsageError(f"{self.refused} can't step this model")
        return settings


@pytest.mark.usefixtures("on_gpu")
def test_what_warp_cannot_step_is_stepped_by_jax_unless_warp_was_asked_for() -> None:
    def made(maker: Maker, implementation: str) -> Any:
        settings = SETTINGS | {"implementation": implementation}
        return make_mjx_engine(maker, settings, platform="gpu", dtype="float32")

    assert made(Maker(), "auto") == SETTINGS | {"implementation": "warp"}
    assert made(Maker(refused="warp"), "auto") == SETTINGS | {"implementation": "jax"}
    with pytest.raises(UsageError, match="warp can't step this model"):
        made(Maker(refused="warp"), "warp")


def test_mjx_says_which_warp_it_needs() -> None:
    pytest.importorskip("mujoco.mjx")
    _, needed = mjx_choice.warp_versions()
    assert needed is not None
    assert needed[0].isdigit()


def test_a_training_that_asks_for_a_warp_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco.mjx")
    from contextlib import ExitStack

    from lockstep.session.jax_envs import build_env

    monkeypatch.setattr(mjx_choice, "warp_versions", lambda: (None, "1.18.0"))
    config = make_config(
        "cartpole_balance", ml_framework="jax", engine="mjx", env={"mjx": {"implementation": "warp"}}, num_envs=64
    )
    with ExitStack() as resources, pytest.raises(UsageError, match=r"warp-lang is not installed; install it with: pip"):
        build_env(config, "cpu", resources)


@pytest.mark.parametrize("others", [{}, {"ml_framework": "jax"}, {"ml_framework": "jax", "engine": "mujoco"}])
def test_warp_is_a_setting_of_mjx_alone(others: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"warp is a setting of the engine mjx, and engine is \w+; use .*--engine mjx"):
        check_offered(make_config("cartpole_balance", env={"mjx": {"implementation": "warp"}}, **others))
