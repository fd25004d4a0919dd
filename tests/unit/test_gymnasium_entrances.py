"""How envs in Gymnasium's interfaces are made: by function, by id, on several ranks, with pictures."""

import importlib.metadata
import subprocess
import sys
from itertools import product
from typing import Literal

import pytest
import torch

import lockstep
from lockstep.core.errors import UsageError
from lockstep.envs.torch_env import TorchEnv
from tests.unit.learner_fixtures import Line, toy_env

pytest.importorskip("gymnasium", reason="needs Gymnasium: pip install 'lockstep-rl[gymnasium]'")

from lockstep.adapters.gymnasium.single import LockstepEnv


def test_an_id_is_known_with_its_module_before_it_and_processes_can_make_envs() -> None:
    script = """
import gymnasium
name = "lockstep.session.gymnasium_envs:lockstep/cartpole_classic-v0"
for mode in (None, "sync", "async"):
    envs = gymnasium.make_vec(name, 2, vectorization_mode=mode)
    observations, _ = envs.reset(seed=1)
    print(type(envs).__name__, observations.shape, (observations[0] != observations[1]).all())
    envs.close()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines() == [
        "LockstepVectorEnv (2, 4) True",
        "SyncVectorEnv (2, 4) True",
        "AsyncVectorEnv (2, 4) True",
    ], result.stderr


def test_every_rank_has_its_own_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    def env_of() -> TorchEnv:
        return lockstep.make_gymnasium_vector_env("cartpole_classic", count, seed=2, device="cpu").env

    count = 4
    whole = env_of().observations["actor"]
    count = 2
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    own = env_of()
    assert own.env_ids.tolist() == [2, 3]
    assert torch.equal(own.observations["actor"], whole[2:])


def test_what_is_asked_for_wrongly_is_said() -> None:
    with pytest.raises(UsageError, match=r"autoreset_mode 'Never' is unknown; use one of NextStep, SameStep, Disabled"):
        lockstep.make_gymnasium_vector_env("cartpole_classic", 2, device="cpu", autoreset_mode="Never")
    with pytest.raises(UsageError, match="observations 'critic' of a Gymnasium env must be 'actor' or 'all'"):
        lockstep.make_gymnasium_env("cartpole_classic", observations="critic")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="task cartpole_classic has no MuJoCo model"):
        lockstep.make_gymnasium_env("cartpole_classic", render_mode="rgb_array")
    with pytest.raises(UsageError, match="render_mode 'human' is not available"):
        lockstep.make_gymnasium_env("cartpole_balance", render_mode="human")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there are 2; make a vector env"):
        LockstepEnv(toy_env(Line(), 2))


@pytest.mark.parametrize("task", ["gymnasium/CartPole-v1", "envpool/CartPole-v1", "brax/ant", "gymnax/CartPole-v1"])
def test_faces_are_of_our_own_envs_and_nothing_is_made_of_others_first(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("an env is made, which nobody would close")

    monkeypatch.setattr("lockstep.session.env_faces.make_env", never)
    modes: tuple[Literal["rgb_array"] | None, ...] = (None, "rgb_array")
    for make, render_mode in product((lockstep.make_gymnasium_env, lockstep.make_gymnasium_vector_env), modes):
        with pytest.raises(UsageError, match=f"task {task} is an env of .*, which has its own way to Gymnasium"):
            make(task, render_mode=render_mode)


@pytest.mark.parametrize("task", ["brax/ant", "gymnax/Pendulum-v1", "playground/CartpoleBalance"])
def test_envs_of_jax_are_not_to_be_had_in_torch_and_nothing_is_made_first(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("an env is made, which occupies JAX's devices")

    monkeypatch.setattr("lockstep.session.make_env.make_task", never)
    for make in (lockstep.make_env, lockstep.make_rsl_rl_env):
        with pytest.raises(UsageError) as said:
            make(task, 4)
        assert str(said.value).startswith(f"task {task} is for ml_framework jax, and the envs that code of your own ")
        assert "\n" not in str(said.value)


def test_a_missing_gymnasium_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("lockstep.core.distributions.version", missing)
    for make in (lockstep.make_gymnasium_env, lockstep.make_gymnasium_vector_env, lockstep.make_rsl_rl_env):
        with pytest.raises(
            UsageError, match=r"not installed here; install it with: pip install 'lockstep-rl\["
        ) as said:
            make("cartpole_classic")
        assert "\n" not in str(said.value)


def test_pictures_show_the_pose() -> None:
    script = """
import numpy as np
import lockstep
env = lockstep.make_gymnasium_env("cartpole_balance", render_mode="rgb_array", max_episode_steps=8)
env.reset(seed=1)
pictures = [env.render()]
for _ in range(8):
    *_, truncated, _ = env.step(np.ones(1))
    pictures.append(env.render())
assert truncated and np.array_equal(pictures[-1], pictures[-2])
assert len({picture.tobytes() for picture in pictures}) == 8
print(pictures[0].shape, pictures[0].dtype)
env.close()
envs = lockstep.make_gymnasium_vector_env("cartpole_balance", 2, render_mode="rgb_array", device="cpu")
envs.reset()
print([picture.shape for picture in envs.render()], envs.metadata["render_modes"], envs.metadata["render_fps"])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    if "UsageError: nothing can be rendered" in result.stderr:
        pytest.skip(result.stderr.splitlines()[-1])
    assert result.stdout.splitlines() == [
        "(480, 480, 3) uint8",
        "[(480, 480, 3), (480, 480, 3)] ['rgb_array'] 50.0",
    ], result.stderr
    assert result.stderr == ""
