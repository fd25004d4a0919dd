"""Training loops, lockstep's own and the user's: found by import string and checked before anything is built."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lockstep.core.errors import UsageError, nearest
from lockstep.core.plugins import registered, the_only_one
from lockstep.core.registry import Registry, load, look_in_current_folder
from lockstep.distributed.topology import require_distributed
from lockstep.recipes.libraries import OWN, library_of, require_several

if TYPE_CHECKING:
    from lockstep.core.types import Comm
    from lockstep.envs.batch_env import BatchEnv
    from lockstep.learn.config import TrainConfig
    from lockstep.learn.observer import Metrics, Observer, OwnTimes, Status

GROUP = "lockstep.runners"
"""Entry points: a name for ``--runner`` to the import string of a runner class."""
LEARNERS: Registry[str] = Registry("algorithm")
"""Name to import string of a class ``(config, env, comm) -> SessionRunner``."""
LEARNERS.register("ppo", "lockstep.learn.torch.loop:PpoRunner")


class Runner(Protocol):
    """A training loop of the user's own, for ``lockstep train --runner my_package.module:Class``, with torch.

    lockstep gives it the task's envs and a run directory, and takes care of the command line, the config, the metrics,
    the display and signals. On several ranks every rank has a runner of its own, which must also be a
    ``lockstep.distributed.DistributedMixin``; all make the same calls in the same order. It may derive from this class,
    but need not.

    To resume, it has ``state_dict()``, made of tensors, numbers, texts, dicts, lists and tuples, and
    ``load_state_dict(state)``, which is given on every rank what rank 0 has read, tensors on the CPU. To start from the
    weights of a checkpoint (``--checkpoint``), it has ``load_weights(state)``, which is given the same.
    """

    distributed_unsupported: ClassVar[str]
    """Why it can't train on several ranks: shown word for word when somebody tries. Leave it out if it can."""

    def __init__(self, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        """Build networks and optimizers.

        Args:
            config: of the run; ``config.agent`` has the settings of lockstep's own learner, of use here or not.
            env: this rank's envs, reset; observations are ``(num_envs, ...)`` tensors on ``env.device``.
            comm: the ranks, one or more.
        """

    def train(self, observer: Observer, evaluation_env: BatchEnv | None) -> Status:
        """Train up to ``config.max_iterations``; return ``finished``, or the reason for an earlier stop.

        Args:
            observer: ``record(metrics)`` takes the numbers of one iteration: means over all ranks, and under the names
                ``mean_return`` and ``mean_episode_length`` what the display shows; iteration, env_steps, wall_s and
                steps_per_s are filled in where they are missing. ``save(iteration, self.state_dict())`` keeps a
                checkpoint. Every rank calls both, rank 0 writes. ``stop_requested`` says why this rank should save
                and stop, or None: ask it once per iteration and agree on it with the others.
            evaluation_env: this rank's share of the envs for evaluations; None if the config wants none.
        """


class SessionRunner(Protocol):
    """What the session runs: lockstep's own learner, or a user's in its harness.

    Every method is called by all processes; contents of checkpoints are given on rank 0 alone.
    """

    config: TrainConfig
    iteration: int
    own_times: OwnTimes | None
    """Of this process in the last iteration; None before the first, or where the learner does not tell."""

    @property
    def so_far(self) -> Metrics:
        """iteration, env_steps and wall_s."""

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""

    def load_state_dict(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Continue where the content of a checkpoint was taken."""

    def load_weights(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Begin with the weights of a checkpoint."""

    def require_ready(self) -> None:
        """Raise UsageError if it can't start, once it has taken up whatever it does and before anything is written."""

    def train(self, observer: Observer, evaluation_env: Any) -> Status:
        """Train; return how it ended."""


def make_runner(config: TrainConfig, env: BatchEnv, comm: Comm) -> SessionRunner:
    """Return what trains by this config, ready to start."""
    if config.rl_library != OWN:
        from lockstep.learn.torch.guest import GuestTraining

        return GuestTraining(library_of(config).learners["torch"], config, env, comm)
    if not config.runner:
        own: SessionRunner = load(LEARNERS.get(config.algorithm))(config, env, comm)
        return own
    from lockstep.session.user_runner import UserRunner

    return UserRunner(load_runner(config.runner), config, env, comm)


def check_learner(config: TrainConfig, world_size: int) -> None:
    """Check lockstep's own learner, if that is what the config asks for. It is loaded, and torch with it.

    Another library is not loaded: some would join a process group of their own where they are imported.

    Raises:
        UsageError: it can't train on so many ranks, as its ``distributed_unsupported`` says.
    """
    require_several(config, world_size)
    if config.rl_library == OWN and not config.runner:
        require_distributed(load(LEARNERS.get(config.algorithm)), f"algorithm {config.algorithm}", world_size)


def check_runner(config: TrainConfig, world_size: int, *, starts_from: str = "") -> None:
    """Check the config's runner, if it has one, without making one.

    Args:
        config: of the run.
        world_size: ranks of the job.
        starts_from: ``checkpoint`` or ``resume`` if the training goes on from somewhere.

    Raises:
        UsageError: it can't be loaded, is no runner, can't train on so many ranks, or can't go on from there.
    """
    if not config.runner:
        return
    from lockstep.distributed.torch_mixin import require_mixin

    kind, name = load_runner(config.runner), f"runner {config.runner}"
    require_distributed(kind, name, world_size)
    require_mixin(kind, name, world_size)
    needed = {"": (), "resume": ("state_dict", "load_state_dict"), "checkpoint": ("state_dict", "load_weights")}
    for method in needed[starts_from]:
        if not callable(getattr(kind, method, None)):
            raise UsageError(f"{name} has no {method}(), which --{starts_from} needs; give it one, or start a new run")


def load_runner(import_string: str) -> type:
    """Return a runner class of the user's, from the current folder or an installed package.

    Raises:
        UsageError: it can't be imported, is no class, or its constructor or ``train`` is not that of a runner.
    """
    kind = load_class(import_string)
    train = getattr(kind, "train", None)
    if not callable(train):
        raise UsageError(f"runner {import_string} has no method train(observer, evaluation_env); give it one")
    if not takes(kind, 3):
        raise UsageError(f"runner {import_string} is not made as {kind.__name__}(config, env, comm); change __init__")
    if not takes(train, 3):
        raise UsageError(f"train() of runner {import_string} does not take (observer, evaluation_env); change it")
    return kind


def load_class(import_string: str) -> type:
    """Return a class that ``--runner`` names, from the current folder or an installed package.

    A name without a colon is one that a package registers, by an entry point of the group ``lockstep.runners``.

    Raises:
        UsageError: it can't be imported, or is no class.
    """
    if ":" not in import_string:
        import_string = _registered(import_string)
    look_in_current_folder()
    try:
        kind = load(import_string)
    except UsageError as error:
        raise UsageError(
            f"runner: {error}; give --runner my_package.module:Class, of the current folder or installed"
        ) from error
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"runner {import_string} can't be imported: {_in_one_line(error)}; run 'python -c \"import "
            f"{import_string.partition(':')[0]}\"' to see all of it"
        ) from error
    if not isinstance(kind, type):
        raise UsageError(f"runner {import_string} is a {type(kind).__name__}, not a class; name the class itself")
    return kind


def _registered(name: str) -> str:
    """Return the import string of a runner that a package registers by a name; the name itself if none does."""
    entry_point = the_only_one(GROUP, "runner", name)
    if entry_point is None and registered(GROUP) and name.isidentifier():
        known = registered(GROUP)
        raise UsageError(f"runner {name!r} is not registered{nearest(name, known)} (known: {', '.join(known)})")
    return name if entry_point is None else entry_point.value


def _in_one_line(error: BaseException) -> str:
    """Return an error's kind, message and the place in the user's code where it was raised."""
    text = str(error).strip().partition("\n")[0]
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # its message names the place
        return what
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{what} ({Path(frame.filename).name}:{frame.lineno})"


def takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """Return whether a function can be called with so many positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # built in, and silent about what it takes
        return True
    return True
