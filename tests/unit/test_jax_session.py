"""A session with JAX in this process, on four CPU devices: what a run holds, and what becomes of its checkpoints."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep
from lockstep.core.errors import UsageError
from lockstep.learn.jax.algorithm import TrainState
from lockstep.session.framework import FRAMEWORKS, count_ranks, framework_of_checkpoint
from lockstep.session.policy import Policy
from lockstep.tasks.cartpole_classic.task import CartpoleClassic

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS: dict[str, Any] = {
    "ml_framework": "jax", "device": "cpu", "num_envs": 8, "max_iterations": 2, "logger": "none",
    "runner": "own_jax_algorithm:Algorithm", "env": {"action_kind": "discrete", "max_episode_steps": 100},
    "agent": {"num_steps_per_env": 4}, "evaluation": {"interval": 0},
}  # fmt: skip


def config_with(**settings: Any) -> Any:
    return lockstep.make_config("cartpole_classic", **{**SETTINGS, **settings})


@pytest.fixture(scope="module", autouse=True)
def _examples_can_be_imported() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations."""
    config = config_with(log_root=str(tmp_path_factory.mktemp("logs")))
    return lockstep.train(config).run_path


@pytest.fixture(scope="module")
def torch_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = str(tmp_path_factory.mktemp("torch"))
    small = {**SETTINGS, "ml_framework": "torch", "runner": "", "max_iterations": 1, "log_root": root}
    return lockstep.train(lockstep.make_config("cartpole_classic", **small)).run_path / "checkpoints" / "model_1.pt"


# --- the run ---------------------------------------------------------------------------------------------------------


def test_every_device_of_the_process_is_a_rank(run: Path) -> None:
    told = json.loads((run / "run.json").read_text())
    assert told["world_size"] == 4
    assert [(rank["rank"], rank["device"], rank["pid"]) for rank in told["ranks"]] == [
        (rank, f"cpu:{rank}", os.getpid()) for rank in range(4)
    ]
    assert "config" not in told["ranks"][0]
    assert "world_size: 4" in (run / "config.yaml").read_text()
    said = (run / "ranks" / "rank_0.log").read_text()
    assert "32 envs on 4 ranks (4 CPU devices of this process), physics by PureAnalyticEngine, learning on cpu" in said
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["env_steps"] for record in records] == [128, 256]
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["latest", "model_2"]


def test_a_run_goes_on_and_a_new_one_starts_from_its_weights(run: Path, tmp_path: Path) -> None:
    weights = run / "checkpoints" / "model_2"
    new = lockstep.train(config_with(num_devices=1, max_iterations=1, log_root=str(tmp_path)), checkpoint=weights)
    saved = [lockstep.load_policy(path) for path in (weights, new.run_path / "checkpoints" / "model_0")]
    first, second = (np.asarray(policy.replicated.parameters["weight_0"]) for policy in saved)  # type: ignore[attr-defined]
    assert (first == second).all()
    # All 32 envs on one device, where four had eight each.
    copy = Path(shutil.copytree(run, tmp_path / "copy", symlinks=True))
    assert lockstep.train(config_with(num_devices=1, num_envs=32, max_iterations=3), resume=copy).run_path == copy
    attempts = json.loads((copy / "run.json").read_text())["attempts"]
    assert [(attempt["iteration"], attempt["world_size"]) for attempt in attempts] == [(0, 4), (2, 1)]
    with pytest.raises(UsageError, match="has 32 envs, not 8"):
        lockstep.train(config_with(num_devices=1, max_iterations=4), resume=copy)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_devices": 8}, "num_devices 8 is more than the 4 CPU devices that JAX has in this process"),
        ({"num_envs": (8, 8)}, "num_envs 8,8 is for 2 ranks, and there are 4"),
        ({"device": "cuda"}, "device 'cuda' was asked for and JAX has none"),
        ({"device": "tpu"}, "device 'tpu' is unknown; use auto, cpu, cuda or cuda:<index>"),
        ({"runner": "json:JSONDecoder"}, r"runner json:JSONDecoder has no method setup\(key, env_ids\)"),
        ({"runner": "test_jax_session:Half"}, r"evaluate\(\) of runner .*:Half does not take \(state, env_ids\)"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "test_jax_session", sys.modules[__name__])
    with pytest.raises(UsageError, match=words) as caught:
        lockstep.train(config_with(**settings))
    assert "\n" not in str(caught.value)
    assert not Path("logs").exists()


class Half:
    """An algorithm that can't evaluate."""

    def __init__(self, config: Any, env: Any, evaluation_env: Any) -> None: ...
    def setup(self, key: Any, env_ids: Any) -> None: ...
    def step(self, state: Any) -> None: ...
    def evaluate(self) -> None: ...


@pytest.mark.parametrize(("own", "other"), [("jax", ("torch", "mujoco")), ("torch", ("jax",))])
def test_a_framework_does_without_the_other(own: str, other: tuple[str, ...]) -> None:
    code = f"import sys, lockstep.session.train, lockstep.session.{own}_session; print([*sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"'{own}'" in loaded
    assert [name for name in other if f"'{name}'" in loaded] == []


# --- the other framework ---------------------------------------------------------------------------------------------


def test_checkpoints_of_the_other_framework_are_named(run: Path, torch_checkpoint: Path) -> None:
    own = run / "checkpoints" / "model_2"
    torch_config = {**SETTINGS, "ml_framework": "torch", "runner": ""}
    with pytest.raises(UsageError, match=r"model_2 is of framework 'jax', not torch; use --ml_framework jax"):
        lockstep.train(lockstep.make_config("cartpole_classic", **torch_config), checkpoint=own)
    with pytest.raises(UsageError, match=r"model_1.pt is of framework 'torch', not jax; use --ml_framework torch"):
        lockstep.train(config_with(), checkpoint=torch_checkpoint)
    with pytest.raises(UsageError, match="is of framework 'torch', not jax"):
        lockstep.train(config_with(), resume=torch_checkpoint.parents[1])
    assert not Path("logs").exists()


def test_what_is_no_checkpoint_is_not_called_one_of_torch(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"is not a lockstep checkpoint: it has no lockstep\.json"):
        lockstep.train(config_with(), checkpoint=tmp_path)
    copy = Path(shutil.copytree(run, tmp_path / "copy", symlinks=True))
    (copy / "checkpoints" / "model_3").write_text("text")
    (copy / "checkpoints" / "latest").unlink()
    assert lockstep.train(config_with(max_iterations=3), resume=copy).run_path == copy
    assert "model_3 is no folder" in capsys.readouterr().err
    attempts = json.loads((copy / "run.json").read_text())["attempts"]
    assert [attempt["iteration"] for attempt in attempts] == [0, 2]


def test_a_checkpoint_knows_its_framework(run: Path, torch_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(run / "checkpoints" / "model_2")
    names = {
        run / "checkpoints" / "model_2": "jax",
        run / "checkpoints" / "latest": "jax",
        tmp_path / "elsewhere": "jax",
        torch_checkpoint: "torch",
        torch_checkpoint.with_name("latest"): "torch",
        tmp_path / "missing": "torch",
        tmp_path / ("x" * 300): "torch",
    }
    assert {path: framework_of_checkpoint(path).name for path in names} == names
    assert list(FRAMEWORKS) == ["torch", "jax"]


def test_ranks_are_counted_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_ranks(config_with(num_devices=3), 2) == 6
    assert count_ranks(config_with(enable_multi_devices=False), 2) == 2
    assert count_ranks(lockstep.make_config("cartpole_classic"), 5) == 5
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "7")
    assert count_ranks(config_with(), 2) == 14


def test_what_a_script_has_set_up_is_counted_once_it_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(jax.devices()) == 4  # JAX has started
    for variable in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):  # so that nothing but JAX itself knows of the four devices
        monkeypatch.delenv(variable, raising=False)
    shares = config_with(num_envs=(4, 0, 8, 4), max_iterations=1, log_root=str(tmp_path))
    assert "world_size: 4" in (lockstep.train(shares).run_path / "config.yaml").read_text()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=7")  # comes too late, and does not count
    monkeypatch.setattr("own_jax_algorithm.Algorithm.distributed_unsupported", "it is alone", raising=False)
    with pytest.raises(UsageError, match=r"runner .* can't train on 4 ranks: it is alone; run it with one process"):
        lockstep.train(config_with(log_root=str(tmp_path / "runner")))
    monkeypatch.setattr(CartpoleClassic, "distributed_unsupported", "so is it", raising=False)
    with pytest.raises(UsageError, match="task cartpole_classic can't train on 4 ranks: so is it"):
        lockstep.train(config_with(log_root=str(tmp_path / "task"), runner=f"{__name__}:Stateless"))
    assert [path.name for path in tmp_path.iterdir()] == ["cartpole_classic"]


# --- the policy ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(run: Path) -> Policy:
    return lockstep.load_policy(run)


def test_a_policy_takes_and_gives_numpy_or_jax(policy: Policy) -> None:
    observations = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    actions = policy(observations)
    assert isinstance(actions, np.ndarray) and actions.shape == (5,) and set(actions.tolist()) <= {0, 1}
    same = policy({"actor": jax.numpy.asarray(observations), "critic": None})
    assert isinstance(same, jax.Array) and (np.asarray(same) == actions).all()
    assert (policy(-observations) != actions).any()
    assert policy.num_observations == 4 and policy.config.task == "cartpole_classic"
    with pytest.raises(ValueError, match=r"observations have shape \(5, 3\), not \(num_envs, 4\)"):
        policy(observations[:, :3])


def test_a_policy_forgets_in_the_envs_that_it_acted_in(policy: Policy) -> None:
    policy(np.zeros((5, 4), np.float32))
    with pytest.raises(ValueError, match=r"done has shape \(2,\), not \(5,\): the policy has acted in 5 envs"):
        policy.reset(np.array([True, False]))
    policy.reset(np.array([True, False, True, False, False]))
    policy.reset()
    policy.reset(np.array([True, False]))


def test_play_gives_the_same_episodes_again(run: Path) -> None:
    first, again = (lockstep.play(run / "checkpoints" / "model_2", 6, seed=3) for _ in range(2))
    assert first == again
    assert first["mean_return"] == first["reward/alive"] == first["mean_episode_length"] > 1
    assert first["max_episode_length"] == 100
    assert first["num_episodes"] == 6
    assert lockstep.play(run / "checkpoints" / "model_2", 6, seed=4) != first


class Stateless:
    """An algorithm that keeps nothing for each env, but a key of ``jax.random`` for all."""

    def __init__(self, config: Any, env: Any, evaluation_env: Any) -> None:
        """There is nothing to build."""

    def setup(self, key: Any, env_ids: Any) -> TrainState:
        return TrainState({"key": key, "weight": jnp.zeros(4, jnp.float32)}, ())

    def step(self, state: TrainState) -> tuple[TrainState, Any]:
        key, own = jax.random.split(state.replicated["key"])
        return TrainState({"key": key, "weight": jax.random.normal(own, (4,), jnp.float32)}, ()), {"num_steps": 1}

    def evaluate(self, state: TrainState, env_ids: Any) -> Any:
        """No evaluation is asked for."""

    def act(self, replicated: Any, observations: Any, memory: Any) -> Any:
        return (observations["actor"] @ replicated["weight"] > 0).astype(jnp.int32), memory

    def initial_memory(self, num_envs: int) -> Any:
        return ()


def test_what_keeps_nothing_for_each_env_is_played_and_goes_on(tmp_path: Path) -> None:
    def run_to(max_iterations: int, root: str, resume: Path | None = None) -> Path:
        own = {"runner": f"{__name__}:Stateless", "log_root": str(tmp_path / root), "max_iterations": max_iterations}
        return lockstep.train(config_with(**own), resume=resume).run_path

    whole, half = run_to(2, "whole"), run_to(1, "half")
    run_to(2, "half", resume=half)
    observations = np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32)
    actions = [lockstep.load_policy(folder)(observations).tolist() for folder in (whole, half)]
    assert actions[0] == actions[1]
    assert 0 < sum(actions[0]) < 50
    assert lockstep.load_policy(half / "checkpoints" / "model_1")(observations).tolist() != actions[0]
