"""A policy of JAX outside of a training: shown step by step, and exported through torch's networks."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import lockstep
from lockstep.core.errors import UsageError
from lockstep.distributed.jax_comm import JaxComm, OwnStore
from lockstep.distributed.jax_mesh import make_mesh
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax import checkpoint
from lockstep.learn.jax.loop import JaxRunner
from lockstep.learn.jax.ppo import Ppo
from lockstep.session.framework import framework_of
from tests.unit.export_fixtures import observations, run_onnx, run_torchscript
from tests.unit.jax_ppo_fixtures import jax_env


def config_of(task: str = "cartpole_classic", **settings: Any) -> TrainConfig:
    return lockstep.make_config(task, ml_framework="jax", num_envs=4, device="cpu", logger="none", **settings)


def untrained(path: Path, **settings: Any) -> Path:
    """Write the checkpoint of a policy that nobody has trained, with weights that are anything but those of a start."""
    config = config_of(**settings)
    with jax.enable_x64(True):
        runner = JaxRunner(
            config, Ppo, jax_env(config), None, make_mesh(jax.devices()[:1]), JaxComm(0, 1, 1, OwnStore())
        )
        content = runner.state_dict()
    generator = np.random.default_rng(3)
    weights = content["replicated"]["weights"]
    weights["parameters"] = jax.tree.map(
        lambda array: (array + 0.3 * generator.normal(size=array.shape)).astype(array.dtype), weights["parameters"]
    )
    for name, value in (("count", 40.0), ("mean", 0.5), ("m2", 90.0)):
        weights["actor_normalizer"][name] = np.full_like(weights["actor_normalizer"][name], value)
    checkpoint.save(content, path)
    return path


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a memory, on a task with a model."""
    return untrained(tmp_path_factory.mktemp("recurrent") / "model_0", agent={"recurrent": "gru"}, dtype="bfloat16")


def test_it_is_loaded_without_the_engine_it_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That may take longer to start than anything else, or not run here at all."""
    path = untrained(
        tmp_path / "model_0", task="cartpole_balance", engine="mjx", env={"mjx": {"implementation": "warp"}}
    )
    monkeypatch.setitem(sys.modules, "lockstep.sim.mjx", None)
    policy = lockstep.load_policy(path, "cpu")
    assert policy.config.engine == "mjx"
    assert np.ptp(np.asarray(policy(observations(5, policy.num_observations)[0]))) > 0.1
    with pytest.raises(UsageError, match=r"no module 'lockstep.sim.mjx'"):  # an evaluation is by the run's own
        framework_of(policy.config).evaluate(policy, policy.config, 1)


def test_it_is_exported(recurrent: Path, tmp_path: Path) -> None:
    assert lockstep.export(recurrent, tmp_path / "out").largest_difference < 1e-5
    told = json.loads((tmp_path / "out" / "policy.json").read_text())
    assert (told["ml_framework"], told["state"]["shape"]) == ("jax", [1, "batch", 64])
    policy = lockstep.load_policy(recurrent, "cpu")
    steps = observations(5, 4)
    own = [np.asarray(policy(each)) for each in steps]
    assert np.ptp(own) > 0.1
    files = (
        run_onnx(tmp_path / "out" / "policy.onnx", steps),
        run_torchscript(tmp_path / "out" / "policy.pt", steps, told["state"]["shape"]),
    )
    for found in files:  # the policy itself computes in bfloat16, of 8 bits
        np.testing.assert_allclose(found, own, rtol=0.05, atol=0.05)
        np.testing.assert_allclose(found, files[0], rtol=1e-5, atol=1e-5)


def test_choices_are_exported(tmp_path: Path) -> None:
    discrete = {"env": {"action_kind": "discrete"}, "agent": {"recurrent": "lstm", "normalize_observations": False}}
    path = untrained(tmp_path / "model_0", **discrete)
    assert lockstep.export(path, tmp_path / "out", ["torchscript"]).largest_difference == 0.0
    assert json.loads((tmp_path / "out" / "policy.json").read_text())["actions"]["dtype"] == "int64"


def test_it_is_shown_as_it_is_evaluated(recurrent: Path) -> None:
    """Step by step, and in the one loop that an evaluation is, an episode takes the same course."""
    policy = lockstep.load_policy(recurrent, "cpu")
    framework = framework_of(policy.config)
    length = int(framework.evaluate(policy, policy.config, 1).lengths[0])
    starts, qpos = [], []
    for number, frame in enumerate(framework.frames(policy, policy.config)):
        starts.append(frame.starts_episode)
        qpos.append(frame.qpos)
        if number == length + 3:
            break
    assert [number for number, starting in enumerate(starts) if starting][:2] == [0, length]
    assert qpos[0].dtype == np.float64
    # A memory that outlived its episode would go on from there, and not as it goes on from a start.
    assert len(np.unique(qpos, axis=0)) == len(qpos)


def test_what_has_no_model_can_not_be_seen(recurrent: Path) -> None:
    with pytest.raises(UsageError, match="cartpole_classic has no MuJoCo model"):
        lockstep.play(recurrent, 1, device="cpu", video="a.mp4")
