"""Soft actor-critic as users start it, on CPU devices of this process: stopped, taken up again, played."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.core.errors import UsageError
from lockstep.learn.jax import checkpoint
from lockstep.learn.jax.training import Training
from tests.unit.export_fixtures import observations, run_onnx, run_torchscript
from tests.unit.jax_training_fixtures import array_differences, untimed
from tests.unit.sac_fixtures import SMALL_AGENT

STOPPED, ALL = 6, 12
SETTINGS: dict[str, Any] = {
    "algorithm": "sac", "ml_framework": "jax", "device": "cpu", "dtype": "float64", "num_devices": 2, "num_envs": 8,
    "max_iterations": ALL, "logger": "none", "env": {"max_episode_steps": 12}, "evaluation": {"interval": 0},
    # A ring of 8 steps per env goes round once before the stop and once after it; learning begins at iteration 2.
    "agent": {**SMALL_AGENT, "replay_size": 16 * 16, "learning_starts": 100},
}  # fmt: skip


def config_with(**settings: Any) -> Any:
    return lockstep.make_config("cartpole_classic", **{**SETTINGS, **settings})


def content(run: Path, iteration: int) -> dict[str, Any]:
    return checkpoint.load(run / "checkpoints" / f"model_{iteration}")


def curve(run: Path) -> list[dict[str, Any]]:
    """Return what was recorded of each iteration, but for times."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "wall_s", "steps_per_s")
    return [{name: found for name, found in each.items() if not name.startswith(timed)} for each in records]


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    for one, other in zip(found, expected, strict=True):
        without = [name for name in other if other[name] is None]
        assert [name for name in one if one[name] is None] == without
        for name in other.keys() - set(without):
            assert one[name] == pytest.approx(other[name], rel=1e-8, abs=1e-10), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one go, on two devices."""
    return lockstep.train(config_with(log_root=str(tmp_path_factory.mktemp("whole")))).run_path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, asked by a signal in its sixth iteration to stop."""
    iterate: Callable[..., Any] = Training.iterate

    def interrupted(training: Training, *arguments: Any) -> Any:
        if training.iteration == STOPPED - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(training, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "iterate", interrupted)
        outcome = lockstep.train(config_with(log_root=str(tmp_path_factory.mktemp("stopped"))))
    assert outcome.status == "preempted"
    return outcome.run_path


def test_a_run_that_was_stopped_goes_on_bit_for_bit(whole: Path, stopped: Path, tmp_path: Path) -> None:
    before = content(stopped, STOPPED)
    assert before["replicated"]["counters"]["num_updates"] > 0
    copy = Path(shutil.copytree(stopped, tmp_path / "copy", symlinks=True))
    assert lockstep.train(config_with(), resume=copy).status == "finished"
    found, expected = untimed(content(copy, ALL)), untimed(content(whole, ALL))
    assert array_differences(found, expected) == []
    assert curve(copy) == curve(whole)
    changed = array_differences(untimed(before), found)
    for part in ("learner.parameters", "learner.target_critics", "learner.optimizer", "normalizers", "counters"):
        assert any(name.startswith(f".replicated.{part}") for name in changed), part
    assert ".sharded.replay" in changed


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_it_goes_on_with_another_number_of_ranks(num_ranks: int, whole: Path, stopped: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(stopped, tmp_path / "copy", symlinks=True))
    settings = {"num_devices": num_ranks, "num_envs": 16 // num_ranks, "max_iterations": STOPPED + 2}
    lockstep.train(config_with(**settings), resume=copy)
    assert_close(curve(copy), curve(whole)[: STOPPED + 2])
    replays = [content(run, iteration)["sharded"]["replay"] for run, iteration in ((copy, 8), (stopped, 6))]
    assert replays[0].shape == replays[1].shape == (16, 16, 19)


def test_it_goes_the_same_way_uncompiled(whole: Path, tmp_path: Path) -> None:
    settings = {"num_devices": 1, "num_envs": 16, "max_iterations": 2, "enable_jit": False}
    found = lockstep.train(config_with(log_root=str(tmp_path), **settings)).run_path
    assert curve(found)[-1]["num_updates"] == 3
    assert_close(curve(found), curve(whole)[:2])


def test_its_policy_is_loaded_and_played(whole: Path) -> None:
    policy = lockstep.load_policy(whole)
    observations = np.random.default_rng(0).normal(size=(5, 4))
    actions = np.asarray(policy(observations))
    assert actions.shape == (5, 1)
    assert (np.abs(actions) <= 1).all()
    assert np.ptp(actions) > 0
    np.testing.assert_allclose(np.asarray(policy(observations[:2])), actions[:2], rtol=1e-5)  # another number of envs
    policy.reset(np.array([True, False]))
    np.testing.assert_allclose(np.asarray(policy(observations[:2])), actions[:2], rtol=1e-5)
    played = lockstep.play(whole, 6, seed=3)
    assert played == lockstep.play(whole, 6, seed=3)
    assert 8 <= played["mean_return"] <= 12
    assert played["num_episodes"] == 6
    assert Path(played["checkpoint"]) == whole / "checkpoints" / (whole / "checkpoints" / "latest").readlink()


def test_a_new_run_starts_from_its_weights(whole: Path, tmp_path: Path) -> None:
    weights = whole / "checkpoints" / f"model_{ALL}"
    settings = {"num_devices": 1, "num_envs": 16, "max_iterations": 1, "seed": 9, "log_root": str(tmp_path)}
    run = lockstep.train(config_with(**settings), checkpoint=weights).run_path
    start, trained = content(run, 0)["replicated"], content(whole, ALL)["replicated"]
    assert array_differences(start["normalizers"], trained["normalizers"]) == []
    assert array_differences(start["learner"]["parameters"], trained["learner"]["parameters"]) == []
    assert array_differences(start["learner"]["target_critics"], trained["learner"]["target_critics"]) == []
    assert not any(array.any() for array in start["counters"].values())
    assert array_differences(start["learner"]["optimizer"], trained["learner"]["optimizer"]) != []
    wider = config_with(**settings, agent={**SETTINGS["agent"], "actor_hidden_dims": (17,)})
    with pytest.raises(UsageError, match=r"of shape \(16, 2\), the config asks for \(17, 2\)"):
        lockstep.train(wider, checkpoint=weights)


def test_it_is_exported(whole: Path, tmp_path: Path) -> None:
    """Its actor becomes torch's, squashed by tanh."""
    exported = lockstep.export(whole, tmp_path / "out")
    assert exported.largest_difference < 1e-5
    policy = lockstep.load_policy(whole)
    steps = observations(5, policy.num_observations)
    own = [np.asarray(policy(each)) for each in steps]
    files = (
        run_onnx(tmp_path / "out" / "policy.onnx", steps),
        run_torchscript(tmp_path / "out" / "policy.pt", steps, None),
    )
    for found in files:
        np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-5)
    assert 0.0 < np.abs(own).max() < 1.0
