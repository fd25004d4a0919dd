"""What a session needs of a machine-learning framework. Each has one object that does it all, found by its name."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lockstep.core.errors import UsageError
from lockstep.core.files import exists
from lockstep.core.registry import Registry, load
from lockstep.distributed.local_devices import count_local_devices
from lockstep.learn.resuming import HEADER_FILE
from lockstep.recipes.libraries import OWN

if TYPE_CHECKING:
    import numpy as np

    from lockstep.core.types import Peers
    from lockstep.envs.batch_env import Physics
    from lockstep.learn.config import TrainConfig
    from lockstep.session.policy import Policy
    from lockstep.session.runner import SessionRunner

Content = dict[str, Any]


@dataclass(frozen=True)
class FrameworkEntry:
    """What is known of a framework without loading it."""

    framework: str
    """Import string of a ``Framework``."""
    ranks_are_devices: bool
    """Whether each device of a process is a rank; else each process is one."""
    has_coordinator: bool
    """Whether ``--coordinator_address`` says where its processes meet; else they meet at torchrun's store alone."""


FRAMEWORKS: Registry[FrameworkEntry] = Registry("ml_framework")
FRAMEWORKS.register("torch", FrameworkEntry("lockstep.session.torch_session:TORCH", False, False))
FRAMEWORKS.register("jax", FrameworkEntry("lockstep.session.jax_session:JAX", True, True))


@dataclass(frozen=True)
class Team:
    """Those who train together, met."""

    comm: Peers
    """The processes, as they see one another."""
    ranks: list[dict[str, Any]]
    """Of each rank, where it runs, for ``run.json``."""
    in_words: str
    """How many ranks there are, and what they are."""
    device: str
    """Where this process learns."""
    mesh: Any = None
    """How the framework sees the ranks, if that is more than ``comm`` tells."""


class Learner(NamedTuple):
    """What trains, with the envs that it needs."""

    runner: SessionRunner
    engine: Physics
    """Of the envs that it learns from."""
    evaluation_env: Any = None
    """This process's share of the envs for evaluations; None if there are no evaluations, or ``runner`` has its own."""


@dataclass(frozen=True)
class Episodes:
    """Whole episodes of a policy."""

    returns: np.ndarray  # (num_episodes,) float64
    lengths: np.ndarray  # (num_episodes,) float64, in env steps
    term_returns: dict[str, np.ndarray] = field(default_factory=dict)  # reward term -> (num_episodes,) float64
    metric_sums: dict[str, np.ndarray] = field(default_factory=dict)  # metric -> the same, summed over env steps


class Frame(NamedTuple):
    """What is to be seen of one env at one moment."""

    qpos: np.ndarray  # (nq,) float64
    qvel: np.ndarray  # (nv,) float64
    starts_episode: bool
    """Whether an episode begins here."""


class Stepper(Protocol):
    """Steps this process's envs with random actions, which depend on the seed and the global env id alone."""

    num_envs: dict[int, int]
    """Global rank to its number of envs, for each rank of this process."""
    env: Any
    """The framework's env."""
    compile_s: float | None
    """Seconds that compiling has taken so far; None where nothing is compiled as a whole."""

    def step(self, num_steps: int) -> dict[int, float]:
        """Run so many env steps of every env, and return when they are done.

        Returns:
            For each rank of this process the seconds until its own last step was done, without compiling; drawing the
            actions is part of it.
        """

    def states(self) -> dict[str, np.ndarray]:
        """Return a copy of what can be seen of this process's envs, on the host, a row for each env.

        Returns:
            ``env_ids`` (global, ascending) and ``observations/<group>``; of tasks of our own kind ``qpos``, ``qvel``
            and ``sensordata`` too.
        """


class Framework(Protocol):
    """All that differs between frameworks in the life of a run. Every rank calls the same methods in the same order."""

    name: str

    def count_ranks(self, config: TrainConfig, num_processes: int) -> int | None:
        """Return how many ranks so many processes will be, or None where only ``join`` can tell. Nothing is started."""

    def check(self, config: TrainConfig, num_processes: int) -> None:
        """Check that lockstep's own learner, if the config has no runner, can train in so many processes.

        Raises:
            UsageError: it can't.
        """

    def check_runner(self, config: TrainConfig, world_size: int, *, starts_from: str = "") -> None:
        """Check the config's runner, if it has one, without making one.

        Args:
            config: of the run.
            world_size: processes of the job.
            starts_from: ``checkpoint`` or ``resume`` if the training goes on from somewhere.

        Raises:
            UsageError: it can't be loaded, is none, can't train in so many processes, or can't go on from there.
        """

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which everything below is to be called."""

    def join(self, config: TrainConfig) -> Team:
        """Meet the other processes, before anything is built.

        Raises:
            UsageError: no such devices, or the processes don't run the same code with the same config, or what trains
                can't do so on so many ranks.
            RunError: processes are missing; they are named.
        """

    def prepare(self, config: TrainConfig, rank: int) -> None:
        """Set this process up for a training: threads, memory, and every random generator that is not ours."""

    def seed(self, seed: int, rank: int, iteration: int) -> None:
        """Seed every random generator that is not ours for a training that goes on after an iteration."""

    def make_learner(self, config: TrainConfig, team: Team, resources: ExitStack) -> Learner:
        """Return what trains by this config, at the point where it starts; it is closed with ``resources``.

        Raises:
            UsageError: the config asks for what can't be.
        """

    def make_stepper(self, config: TrainConfig, team: Team, resources: ExitStack) -> Stepper:
        """Return this process's envs of a benchmark, reset; they are closed with ``resources``.

        Raises:
            UsageError: the config asks for what can't be.
        """

    def make_apart(self, config: TrainConfig, team: Team, resources: ExitStack) -> Learner | None:
        """Return a training of this process's ranks alone, whose iterations tell what they need without the others.

        Its runner has ``iterate()``, which runs one iteration. It takes the memory of another training.

        Returns:
            None for a process that is alone, or where exchanges are timed one by one anyway.
        """

    def load(self, path: Path) -> Content:
        """Return the content of a checkpoint, in the memory of the host; nothing in it is executed.

        Raises:
            DamagedError: truncated or damaged.
            UsageError: missing, unreadable, or not a checkpoint of this framework.
        """

    def save(self, content: Content, path: Path) -> None:
        """Write a checkpoint."""

    def snapshot(self, content: Content) -> Callable[[Path], None]:
        """Copy a checkpoint's content and return what writes the copy, in any thread."""

    def load_policy(self, path: Path, device: str) -> Policy:
        """Return the policy of a checkpoint.

        Raises:
            UsageError: it can't be loaded.
        """

    def evaluate(self, policy: Policy, config: TrainConfig, num_episodes: int) -> Episodes:
        """Run whole episodes with the most likely actions, one per env, all at once.

        Args:
            policy: that ``load_policy`` returned.
            config: with the device, the seed and the env's settings.
            num_episodes: how many.
        """

    def frames(self, policy: Policy, config: TrainConfig) -> Generator[Frame]:
        """Yield every state of the first env of an evaluation, with the most likely actions, without end.

        Args:
            policy: that ``load_policy`` returned; its memory is cleared where an episode begins.
            config: with the device, the seed and the env's settings.
        """


def count_ranks(config: TrainConfig, num_processes: int) -> int:
    """Return how many ranks so many processes will be. Nothing is loaded, and no device is started."""
    several = config.enable_multi_devices and config.rl_library == OWN  # others compute on one device of each process
    if not (FRAMEWORKS.get(config.ml_framework).ranks_are_devices and several):
        return num_processes
    return num_processes * count_local_devices(config.device, config.num_devices, num_processes)


def framework_of(config: TrainConfig) -> Framework:
    """Return the framework that a config asks for."""
    return _load(config.ml_framework)


def framework_of_checkpoint(path: Path) -> Framework:
    """Return the framework that can say most of a checkpoint: that of its kind, or torch if it is none at all."""
    return _load("jax" if _is_folder_of_jax(path) else "torch")


def require_same_framework(path: Path, config: TrainConfig) -> None:
    """Raise UsageError if a checkpoint is of another framework than the config asks for."""
    found, wanted = framework_of_checkpoint(path).name, config.ml_framework
    # What is of no kind is not torch's for that: the framework that is asked for says what is wrong with it.
    is_known = found != "torch" or zipfile.is_zipfile(path)
    if found != wanted and is_known and exists(path):
        raise UsageError(f"checkpoint {path} is of framework '{found}', not {wanted}; use --ml_framework {found}")


def _is_folder_of_jax(path: Path) -> bool:
    try:
        return (path / HEADER_FILE).exists() or (path.name.startswith("model_") and path.is_dir())
    except OSError:  # a name that no path may have
        return False


def _load(name: str) -> Framework:
    try:
        framework: Framework = load(FRAMEWORKS.get(name).framework)
    except ValueError as error:  # what JAX raises while it is imported, for a variable of its own
        if "JAX" not in str(error):
            raise
        raise UsageError(f"JAX refuses the environment: {error}; mend or unset that variable") from None
    return framework
