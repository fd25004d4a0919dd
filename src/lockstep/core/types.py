"""The protocols between the layers: what a task, an engine, a policy and a communicator are.

Arrays are annotated as ``Array``: any array of the Python array API (numpy, torch, jax.numpy). Shapes are written
``(num_envs, nq)``; ``xp`` is the array namespace that made the arrays (``array_api_compat.array_namespace``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

Array = Any
Namespace = Any
Physics = dict[str, Array]
"""The physics of a batch of envs by name, each array ``(num_envs, ...)``: all that a bitwise continuation needs."""
Observations = dict[str, Array]
"""Observation groups by name, each ``(num_envs, num_observations[name])``; always ``"actor"`` and ``"critic"``."""


class State(NamedTuple):
    """The state of a batch of envs; a named tuple, so JAX takes it as a pytree as it is."""

    qpos: Array  # (num_envs, nq) generalised positions
    qvel: Array  # (num_envs, nv) generalised velocities
    ctrl: Array  # (num_envs, nu) controls applied during the last env step, zeros after a reset
    sensordata: Array  # (num_envs, num_sensordata) MuJoCo's: one physics step older than qpos and qvel
    variables: dict[str, Array]  # the task's own variables, each (num_envs, ...)


class InitialState(NamedTuple):
    """What a task's reset returns: where an episode starts."""

    qpos: Array  # (num_envs, nq)
    qvel: Array  # (num_envs, nv)
    variables: dict[str, Array]  # the same keys as State.variables


@dataclass(frozen=True)
class ActionSpace:
    """``continuous``: actions are floats ``(num_envs, size)``; ``discrete``: integers ``(num_envs,)`` in [0, size)."""

    kind: Literal["continuous", "discrete"]
    size: int
    limit: float = 1.0
    """Beyond +- this no entry of a continuous action changes anything more, since the task clips it.

    Infinity where some entry has no such bound. Learners that need bounds, or choose within them, go by it.
    """


class Task(Protocol):
    """Model, observation, reward, termination and reset: pure functions, written once for every framework.

    A task holds its (immutable) config and nothing else. All randomness arrives as ``noise``, uniform in [0, 1).
    New arrays are made from those given (``xp.zeros_like``), so dtype and device follow the caller. Tasks inherit from
    this class; what has a value or a body here may be left as it is, and one that lacks a method can't be made
    (``TypeError``).
    """

    action_space: ActionSpace
    num_observations: Mapping[str, int]
    reward_terms: tuple[str, ...]
    metric_terms: tuple[str, ...] = ()
    """Quantities to watch that are no part of the reward; logged as means over env steps."""
    num_reset_noise: int
    num_step_noise: int
    num_models: int = 1
    """How many variants of the model there are: env ``i`` (global id) has variant ``i % num_models``.

    1: every env has the model as its file says, and ``vary_model`` is not asked.
    """
    num_model_noise: int = 0
    """How many random numbers a variant is drawn by; at least 1 where there are several."""
    max_step_reward: float
    """The largest sum of all reward terms in one env step."""
    max_episode_steps: int | None = None
    """The time limit in env steps where the task itself knows it; None: the settings of the env have it."""
    model_path: Path | None
    """The MJCF file; None for a task with equations of motion of its own (engine ``analytic``)."""
    step_duration_s: float
    """Simulated seconds per env step."""

    def vary_model(self, model: Any, noise: Array) -> None:
        """Change a copy of the compiled model (``mujoco.MjModel``) in place into a variant.

        Sizes must stay as they are; constants that MuJoCo derives from what was changed follow by themselves. It
        refuses what the compiled model has no place for: a body whose centre of mass or inertia moves needs
        ``simple="false"`` in the file if its frame was that of its inertia.

        Args:
            model: a copy of the task's model.
            noise: ``(num_model_noise,)`` float64 numpy array, of this variant.
        """
        return

    @abstractmethod
    def reset(self, xp: Namespace, noise: Array) -> InitialState:
        """Return where episodes start; ``noise`` is ``(num_envs, num_reset_noise)``."""

    @abstractmethod
    def control(self, xp: Namespace, state: State, action: Array) -> Array:
        """Return the controls ``(num_envs, nu)`` for an action of the policy (not yet clipped by anybody)."""

    def push(self, xp: Namespace, state: State, noise: Array) -> Array | None:
        """Return what is added to the velocities ``(num_envs, nv)`` before the physics of a step; None: never a push.

        ``noise`` is that of the step, ``(num_envs, num_step_noise)``.
        """
        return None

    @abstractmethod
    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        """Return the state with the task's variables brought up to date after the physics of one env step."""

    @abstractmethod
    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        """Return the observation groups; ``noise`` is ``(num_envs, num_step_noise)``."""

    @abstractmethod
    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        """Return each reward term ``(num_envs,)`` of the step that led to ``state``; the reward is their sum."""

    def metrics(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        """Return each of ``metric_terms (num_envs,)`` of the step that led to ``state``."""
        return {}

    @abstractmethod
    def terminations(self, xp: Namespace, state: State) -> Array:
        """Return ``(num_envs,)`` booleans: the episode ends here for good (the time limit is the env's business)."""


class AnalyticTask(Task, Protocol):
    """A task that brings its own equations of motion."""

    num_positions: int
    num_velocities: int
    num_controls: int

    @abstractmethod
    def dynamics(self, xp: Namespace, qpos: Array, qvel: Array, ctrl: Array) -> tuple[Array, Array]:
        """Return ``(qpos, qvel)`` one physics step later."""


class StepInfo(NamedTuple):
    """What an engine reports of one env step."""

    qpos: Array  # (num_envs, nq)
    qvel: Array  # (num_envs, nv)
    sensordata: Array  # (num_envs, num_sensordata)
    diverged: Array  # (num_envs,) bool: physics failed (NaN or a MuJoCo warning); the env must be reset


class Engine(Protocol):
    """Steps physics for a batch of envs. Knows nothing of rewards, episodes or ranks."""

    num_envs: int
    num_positions: int
    num_velocities: int
    num_controls: int
    num_sensordata: int
    takes_numpy: ClassVar[bool]
    """Arrays cross the border as numpy arrays on the host, in float64; otherwise in the caller's framework."""

    def step(self, ctrl: Array, push: Array | None = None) -> StepInfo:
        """Advance every env by one env step under constant ``ctrl (num_envs, nu)``.

        ``push (num_envs, nv)`` is added to the velocities before the first physics step.
        """

    def reset(self, mask: Array, qpos: Array, qvel: Array) -> Array:
        """Put the envs of ``mask (num_envs,)`` at the given state; return sensordata ``(num_envs, num_sensordata)``.

        A numpy engine may be given None for the state when the mask is empty.
        """

    def state_dict(self) -> dict[str, Array]:
        """Return everything a bitwise continuation needs, each array with a leading ``num_envs`` axis."""

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take up what ``state_dict`` returned."""

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """How often the physics library gave which warning, in envs and env steps."""

    def log_to(self, path: Path) -> None:
        """Append what the physics library has to say (warnings) to a file from now on."""

    def close(self) -> None:
        """Release threads and memory."""


class PureEngine(Protocol):
    """Steps physics for a batch of envs as pure functions of its state, so that JAX can compile, batch and shard them.

    What comes back of a failed env is as with ``Engine``: it is flagged and keeps the physics it began the step with.
    """

    num_positions: int
    num_velocities: int
    num_controls: int
    num_sensordata: int

    def start(self, env_ids: Array) -> Physics:
        """Return the physics of envs in their models' default state.

        ``env_ids (num_envs,)`` are int32 global ids, which say who has which variant of the model; -1 for padding.
        """

    def step(self, physics: Physics, ctrl: Array, push: Array | None = None) -> tuple[Physics, StepInfo]:
        """Advance every env by one env step under constant ``ctrl (num_envs, num_controls)``.

        ``push (num_envs, num_velocities)`` is added to the velocities before the first physics step.
        """

    def reset(self, physics: Physics, mask: Array, qpos: Array, qvel: Array) -> tuple[Physics, Array]:
        """Put the envs of ``mask (num_envs,)`` at ``qpos`` and ``qvel``; all else of them is the default again.

        Returns the physics, and the sensordata ``(num_envs, num_sensordata)``: of ``mask``'s envs that of their new
        state, of the others that of their last step.
        """

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """How often the physics library gave which warning, in envs and env steps."""

    def log_to(self, path: Path) -> None:
        """Append what the physics library has to say (warnings) to a file from now on."""

    def close(self) -> None:
        """Release threads and memory."""


class FlatGradients(Protocol):
    """The learner's flat gradient buffer, as a communicator sees it."""

    flat: torch.Tensor
    """``(size,)``: gradient sums, what rides along, the sample count, a non-finite flag per rank; summed over ranks."""
    parts: Sequence[slice]
    """The parts of ``flat`` that travel in one piece each, in the order in which they become complete."""

    def watch(self, complete: Callable[[slice], None]) -> AbstractContextManager[None]:
        """Call back during the backward pass of the context whenever the next part is complete, in order."""

    def flag_nonfinite_(self, rank: int, part: slice) -> None:
        """Set this rank's flag to 1 if any of its sums in ``part`` is not finite; called before the reduction."""

    def divide_by_count_(self) -> None:
        """Turn sums into means over all samples; called after the reduction."""


class Wait(NamedTuple):
    """One exchange between ranks, as one of them has seen it."""

    tag: str
    """What was exchanged."""
    seconds: float
    """For which this rank stood in it, waiting for others included."""
    num_bytes: int
    """Of this rank's own message."""


class Peers(Protocol):
    """What a session sees of the other processes of the job, in any framework. A single process gets a real one too.

    Every method that all processes must call together takes a ``tag``, which says in messages what it is for.
    """

    rank: int
    """Of this process among all processes."""
    world_size: int
    """How many processes there are."""
    num_ranks: int
    """How many devices train together: as many as processes in torch, where a rank is a process."""

    def gather_text(self, text: str, tag: str) -> list[str]:
        """Return every process's text, on every process."""

    def on_main(self, work: Callable[[], str], tag: str) -> str:
        """Run ``work`` on process 0 alone and return its text on every process.

        Raises:
            LockstepError: what ``work`` raised, on every process.
        """

    def log_to(self, folder: Path) -> None:
        """Say where the debug mode writes down what this process exchanged."""

    def take_waits(self) -> list[Wait]:
        """Return the exchanges of this process since the last call, in an order that is the same on all of them."""

    def close(self) -> None:
        """Leave the group."""


class Comm(Peers, Protocol):
    """What a learner sees of the other ranks (torch). A single process gets a real one too."""

    def broadcast_(self, tensors: Mapping[str, torch.Tensor], tag: str) -> None:
        """Overwrite every tensor with rank 0's, in place and bit for bit."""

    def last_backward(self, gradients: FlatGradients) -> AbstractContextManager[None]:
        """Reduce parts of the buffer while the last backward pass of a minibatch, run in the context, goes on."""

    def mean_gradients_(self, gradients: FlatGradients, meanwhile: Callable[[], None] = ...) -> None:
        """Sum the flat gradient buffer and what rides in it over ranks, then divide by the global sample count.

        ``meanwhile`` is work of this rank that fills the time until the others' gradients are here.
        """

    def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """Return ``(world_size, *tensor.shape)``: every rank's tensor, the same on every rank."""

    def gather_rows(self, rows: torch.Tensor, tag: str) -> torch.Tensor:
        """Return ``(sum of num_rows, ...)`` on rank 0: all ranks' ``rows (num_rows, ...)`` in the order of ranks.

        The number of rows may differ from rank to rank. Other ranks get their own rows back.
        """
