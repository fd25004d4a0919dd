"""Small tasks, trainings and communicators that the tests of envs and learner share."""

import io
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import array_api_compat.torch
import torch

from lockstep.core.config import merge
from lockstep.core.types import ActionSpace, Array, Comm, InitialState, Namespace, Observations, State, Task, Wait
from lockstep.distributed.torch_collectives import Collectives
from lockstep.distributed.torch_comm import GroupComm, SoloComm
from lockstep.envs.config import EnvConfig
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.training import Training
from lockstep.recipes.cartpole import cartpole_classic
from lockstep.session.make_env import build_env
from lockstep.sim.analytic import AnalyticEngine

CPU = torch.device("cpu")
T = TypeVar("T")


class Line(Task):
    """A point on a line that moves by what the action says; it fails at 3 or beyond.

    Position, reward and length of every episode follow from the actions by counting. Rewards: ``progress`` is the
    action, ``alive`` is 1. The critic also sees the last action, the variable ``age`` and the step's noise.
    """

    action_space = ActionSpace("continuous", 1)
    num_observations: Mapping[str, int] = {"actor": 1, "critic": 4}
    reward_terms: tuple[str, ...] = ("progress", "alive")
    num_reset_noise = 1
    num_step_noise = 1
    max_step_reward = 4.0
    model_path: Path | None = None
    step_duration_s = 1.0
    num_positions = num_velocities = num_controls = 1

    def __init__(self, spread: float = 0.0) -> None:
        self.spread = spread

    def reset(self, xp: Namespace, noise: Array) -> InitialState:
        start = noise * self.spread
        return InitialState(start, xp.zeros_like(start), {"age": xp.zeros_like(start)})

    def control(self, xp: Namespace, state: State, action: Array) -> Array:
        return action

    def dynamics(self, xp: Namespace, qpos: Array, qvel: Array, ctrl: Array) -> tuple[Array, Array]:
        return qpos + ctrl, qvel

    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        return state._replace(variables={"age": state.variables["age"] + 1})

    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        critic = xp.concat((state.qpos, state.ctrl, state.variables["age"], noise), axis=1)
        return {"actor": state.qpos, "critic": critic}

    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        return {"progress": state.ctrl[:, 0], "alive": xp.ones_like(state.ctrl[:, 0])}

    def terminations(self, xp: Namespace, state: State) -> Array:
        return state.qpos[:, 0] >= 3


class Recall(Task):
    """A cue, 1 or -1, is shown in the first step only; three steps later action 1 or 0 is right. Needs a memory."""

    action_space = ActionSpace("discrete", 2)
    num_observations: Mapping[str, int] = {"actor": 2, "critic": 2}
    reward_terms: tuple[str, ...] = ("recalled",)
    num_reset_noise = 1
    num_step_noise = 0
    max_step_reward = 1.0
    model_path: Path | None = None
    step_duration_s = 1.0
    num_positions = num_velocities = 1  # the cue, and the time
    num_controls = 0
    last_step = 3

    def reset(self, xp: Namespace, noise: Array) -> InitialState:
        return InitialState(2 * xp.round(noise) - 1, xp.zeros_like(noise), {})

    def control(self, xp: Namespace, state: State, action: Array) -> Array:
        return state.qpos[:, :0]

    def dynamics(self, xp: Namespace, qpos: Array, qvel: Array, ctrl: Array) -> tuple[Array, Array]:
        return qpos, qvel + 1

    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        return state

    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        cue = xp.where(state.qvel == 0, state.qpos, xp.zeros_like(state.qpos))
        observation = xp.concat((cue, state.qvel / self.last_step), axis=1)
        return {"actor": observation, "critic": observation}

    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        right = (action == 1) == (state.qpos[:, 0] > 0)
        counts = state.qvel[:, 0] > self.last_step
        return {"recalled": xp.astype(right & counts, state.qpos.dtype)}

    def terminations(self, xp: Namespace, state: State) -> Array:
        return state.qvel[:, 0] > self.last_step


def toy_env(
    task: Any,
    num_envs: int,
    *,
    max_episode_steps: int = 100,
    randomize: bool = False,
    dtype: torch.dtype = torch.float64,
    **arguments: Any,
) -> TorchEnv:
    """Return envs of an analytic toy; ``arguments`` are those of TorchEnv."""
    config = EnvConfig(max_episode_steps=max_episode_steps, randomize_initial_episode_length=randomize)
    engine = AnalyticEngine(task, num_envs, 1, array_api_compat.torch, dtype=dtype, device=CPU)
    return TorchEnv(task, engine, config, device=CPU, dtype=dtype, **({"seed": 1} | arguments))


def build_own_env(config: TrainConfig, **arguments: Any) -> TorchEnv:
    """The envs of a config whose task is lockstep's own."""
    env = build_env(config, **arguments)
    assert isinstance(env, TorchEnv)
    return env


def small_config(**overrides: Any) -> TrainConfig:
    """Return the recipe of ``cartpole_classic`` shrunk to milliseconds per iteration; ``agent`` etc. are merged."""
    agent: dict[str, Any] = {
        "actor_hidden_dims": (8,),
        "critic_hidden_dims": (8,),
        "recurrent_hidden_dim": 6,
        "num_steps_per_env": 6,
        "num_learning_epochs": 2,
        "num_mini_batches": 2,
    }
    agent |= overrides.pop("agent", {})
    return merge(cartpole_classic(), {"num_envs": 8, "device": "cpu", "agent": agent, **overrides})


def make_training(config: TrainConfig, env: TorchEnv | None = None, comm: Comm | None = None) -> Training:
    """Return a new training; the env defaults to that of the config. Small tensors gain nothing from threads."""
    torch.set_num_threads(1)
    return Training(config, build_env(config) if env is None else env, SoloComm() if comm is None else comm)


def round_trip(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint file would give back."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def differences(one: object, other: object, name: str = "") -> list[str]:
    """Return the names of all entries of two nested containers that are not equal bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [name]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [f"{name}: {one.keys() ^ other.keys()}"]
        return [found for key in one for found in differences(one[key], other[key], f"{name}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [
            found
            for index, (a, b) in enumerate(zip(one, other, strict=True))
            for found in differences(a, b, f"{name}.{index}")
        ]
    return [] if one == other else [name]


class Meeting:
    """Where ranks that are threads of this process exchange tensors."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=5)
        self.slots: list[torch.Tensor] = [torch.zeros(())] * world_size


class Done:
    """An operation that is over."""

    def wait(self) -> None:
        pass


class ThreadCollectives(Collectives):
    """The operations of a process group between threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, len(meeting.slots), meeting
        self.device = CPU
        self.num_started = 0

    def start_all_reduce_(self, tensor: torch.Tensor, tag: str) -> Done:
        tensor.copy_(self._exchange(tensor).sum(0))
        return Done()

    def broadcast_(self, tensor: torch.Tensor, tag: str) -> None:
        tensor.copy_(self._exchange(tensor)[0])

    def all_gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        return self._exchange(tensor)

    def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor | None:
        gathered = self._exchange(tensor)
        return gathered if self.rank == 0 else None

    def take_waits(self) -> list[Wait]:
        return []

    def _exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_started += 1
        self._meeting.slots[self.rank] = tensor.clone()
        self._meeting.barrier.wait()
        gathered = torch.stack(self._meeting.slots)
        self._meeting.barrier.wait()
        return gathered


def thread_comm(rank: int, meeting: Meeting) -> GroupComm:
    """Return the communicator of a rank that is a thread."""
    return GroupComm(ThreadCollectives(rank, meeting))


def on_every_rank(meeting: Meeting, work: Callable[[int], T]) -> list[T]:
    """Call ``work(rank)`` on all ranks at once; an exception on one frees the others from waiting for it."""

    def guarded(rank: int) -> T:
        try:
            return work(rank)
        except BaseException:
            meeting.barrier.abort()
            raise

    world_size = len(meeting.slots)
    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(guarded, rank) for rank in range(world_size)]]
