"""A session with JAX: a rank is a device, and one process may have several."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from lockstep.core.errors import UsageError
from lockstep.core.registry import Registry, load
from lockstep.distributed.jax_devices import in_words, kind_of, name_of
from lockstep.distributed.jax_group import is_set_up, join
from lockstep.distributed.topology import require_distributed
from lockstep.learn.jax import checkpoint
from lockstep.learn.jax.algorithm import Algorithm
from lockstep.learn.jax.loop import GuestRunner, JaxRunner
from lockstep.recipes.libraries import OWN, library_of
from lockstep.session.framework import Content, Episodes, Frame, Learner, Stepper, Team, count_ranks
from lockstep.session.jax_envs import build_env, check_room, platform_of
from lockstep.session.placement import compare, describe_rank
from lockstep.session.process import keep_large_buffers, seed_plain_generators
from lockstep.session.runner import load_class, takes

if TYPE_CHECKING:
    from lockstep.distributed.jax_comm import JaxComm
    from lockstep.distributed.jax_mesh import RankMesh
    from lockstep.envs.jax_env import JaxEnv
    from lockstep.learn.config import TrainConfig
    from lockstep.session.policy import Policy

ALGORITHMS: Registry[str] = Registry("algorithm")
"""Name to import string of an ``Algorithm``."""
ALGORITHMS.register("ppo", "lockstep.learn.jax.ppo:Ppo")
ALGORITHMS.register("sac", "lockstep.learn.jax.sac:Sac")

_METHODS = {"setup": ("key", "env_ids"), "step": ("state",), "evaluate": ("state", "env_ids")}


class JaxFramework:
    """The ``Framework`` jax."""

    name = "jax"

    def count_ranks(self, config: TrainConfig, num_processes: int) -> int | None:
        """Return the number of devices of all processes, or None where a script has set JAX up in its own way."""
        return None if is_set_up() else count_ranks(config, num_processes)

    def check(self, config: TrainConfig, num_processes: int) -> None:
        """Check lockstep's own learner, or what another library's can't do: it is not loaded."""
        if config.rl_library != OWN:
            _check_guest(config)
        elif not config.runner:
            self._require_distributed(config, num_processes)

    def check_runner(self, config: TrainConfig, world_size: int, *, starts_from: str = "") -> None:
        """Check the config's runner: an ``Algorithm`` of the user's."""
        if not config.runner:
            return
        self._require_distributed(config, world_size)
        kind, name = algorithm_of(config), _name_of_algorithm(config)
        for method in ("weights", "with_weights") if starts_from == "checkpoint" else ():
            if not callable(getattr(kind, method, None)):
                raise UsageError(f"{name} has no {method}(), which --checkpoint needs; give it one, or start a new run")

    def _require_distributed(self, config: TrainConfig, num_processes: int) -> None:
        num_ranks = self.count_ranks(config, num_processes)
        if num_ranks is not None:  # otherwise ``join`` asks
            require_distributed(algorithm_of(config), _name_of_algorithm(config), num_ranks)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have JAX count, and sum episodes, in 64 bits; all else says its type itself."""
        with jax.enable_x64(True):
            yield

    def join(self, config: TrainConfig) -> Team:
        """Meet the other processes; a rank is a device of the mesh of all."""
        several = config.enable_multi_devices and config.rl_library == OWN
        mesh, comm = join(config.device, num_devices=config.num_devices, multi_devices=several)
        devices = mesh.mesh.devices.flat
        own = {"devices": {rank: name_of(devices[rank]) for rank in mesh.local_ranks}}
        device = kind_of(devices[mesh.local_ranks[0]])
        said = describe_rank(config, device, "jax") | own
        processes = [json.loads(text) for text in comm.gather_text(json.dumps(said), "placement")]
        try:
            compare(processes)
            if config.rl_library == OWN:
                require_distributed(algorithm_of(config), _name_of_algorithm(config), mesh.num_ranks)
        except UsageError:
            comm.close()
            raise
        return Team(comm, _by_rank(processes), in_words(mesh) + _of_several(config, mesh), device, mesh)

    def prepare(self, config: TrainConfig, rank: int) -> None:
        """Set up the allocator and the generators of Python and numpy."""
        self.seed(config.seed, rank, 0)
        keep_large_buffers()

    def seed(self, seed: int, rank: int, iteration: int) -> None:
        """Seed the generators of Python and numpy; JAX has none of its own."""
        seed_plain_generators(seed, rank, iteration)

    def make_learner(self, config: TrainConfig, team: Team, resources: ExitStack) -> Learner:
        """Build the envs, once for all devices, and the training of the algorithm, on the mesh."""
        ranks: RankMesh = team.mesh
        comm: JaxComm = team.comm  # type: ignore[assignment]  # that this framework has made
        platform = platform_of(ranks)
        env = build_env(config, platform, resources)
        check_room(config, env, ranks)
        evaluation_env = None
        if config.evaluation.interval:
            evaluation_env = build_env(config, platform, resources, "evaluation", env.task)
        return Learner(make_runner(config, env, evaluation_env, ranks, comm), env.engine)

    def make_stepper(self, config: TrainConfig, team: Team, resources: ExitStack) -> Stepper:
        """Build the envs, once for all devices of this process."""
        from lockstep.session.jax_random import JaxStepper

        ranks: RankMesh = team.mesh
        env = build_env(config, platform_of(ranks), resources)
        check_room(config, env, ranks)
        return JaxStepper(config, env, ranks, resources)

    def make_apart(self, config: TrainConfig, team: Team, resources: ExitStack) -> Learner | None:
        """Build a training on the mesh of this process's own devices; exchanges of other libraries are timed anyway."""
        if config.rl_library != OWN:
            return None
        from lockstep.session.jax_apart import make_apart

        return make_apart(config, team, resources, algorithm_of(config))

    def load(self, path: Path) -> Content:
        """Read a checkpoint folder."""
        return checkpoint.load(path)

    def save(self, content: Content, path: Path) -> None:
        """Write a checkpoint folder."""
        checkpoint.save(content, path)

    def snapshot(self, content: Content) -> Callable[[Path], None]:
        """Return what writes a checkpoint's content, which is in the memory of the host."""
        return checkpoint.snapshot(content)

    def load_policy(self, path: Path, device: str) -> Policy:
        """Return the policy of a checkpoint folder."""
        from lockstep.session.jax_policy import load_policy

        return load_policy(path, device, algorithm_of)

    def evaluate(self, policy: Policy, config: TrainConfig, num_episodes: int) -> Episodes:
        """Run whole episodes on one device."""
        from lockstep.session.jax_policy import JaxPolicy, evaluate

        assert isinstance(policy, JaxPolicy)
        return evaluate(policy, config, num_episodes)

    def frames(self, policy: Policy, config: TrainConfig) -> Generator[Frame]:
        """Step one env on one device."""
        from lockstep.session.jax_policy import JaxPolicy, frames

        assert isinstance(policy, JaxPolicy)
        return frames(policy, config)


def make_runner(
    config: TrainConfig, env: JaxEnv, evaluation_env: JaxEnv | None, ranks: RankMesh, comm: JaxComm
) -> JaxRunner | GuestRunner:
    """Return what trains by this config, ready to start."""
    if config.rl_library != OWN:
        return GuestRunner(library_of(config).learners["jax"], config, env, evaluation_env, ranks, comm)
    return JaxRunner(config, algorithm_of(config), env, evaluation_env, ranks, comm)


def _check_guest(config: TrainConfig) -> None:
    """Raise UsageError for settings that a learner of another library has no use for."""
    if config.num_devices > 1:
        raise UsageError(
            f"rl_library {config.rl_library} computes on one device of each process, and num_devices is "
            f"{config.num_devices}; use lockstep train_multigpu, which starts a process for each, or --num_devices 1"
        )
    if not config.enable_jit:
        raise UsageError(
            f"enable_jit False is not available with rl_library {config.rl_library}, which compiles its programs "
            "itself; leave it on"
        )


def _of_several(config: TrainConfig, mesh: RankMesh) -> str:
    """Return what is to be said of devices of this process that another library leaves alone, "" if there are none."""
    platform = mesh.mesh.devices.flat[mesh.local_ranks[0]].platform
    count = len(jax.local_devices(backend=platform))
    if config.rl_library == OWN or count == 1:
        return ""
    return f" (one of the {count} devices of this process: {config.rl_library} computes on one)"


def algorithm_of(config: TrainConfig) -> type[Algorithm]:
    """Return the class that a config trains with: lockstep's own, or the user's that ``runner`` names.

    Raises:
        UsageError: that can't be loaded, or is no algorithm.
    """
    if not config.runner:
        own: type[Algorithm] = load(ALGORITHMS.get(config.algorithm))
        return own
    kind, name = load_class(config.runner), f"runner {config.runner}"
    for method, arguments in _METHODS.items():
        found = getattr(kind, method, None)
        if not callable(found):
            raise UsageError(
                f"{name} has no method {method}({', '.join(arguments)}), as every algorithm of JAX has; give it one "
                "(see examples/own_jax_algorithm.py), or use --ml_framework torch"
            )
        if not takes(found, 1 + len(arguments)):
            raise UsageError(f"{method}() of {name} does not take ({', '.join(arguments)}); change it")
    if not takes(kind, 3):
        raise UsageError(f"{name} is not made as {kind.__name__}(config, env, evaluation_env); change __init__")
    return kind


def _name_of_algorithm(config: TrainConfig) -> str:
    return f"runner {config.runner}" if config.runner else f"algorithm {config.algorithm}"


def _by_rank(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what ``run.json`` says of each rank: where its process runs, and its device there."""
    ranks: list[dict[str, Any]] = []
    for number, process in enumerate(processes):
        place = {name: value for name, value in process.items() if name not in ("config", "devices")}
        ranks += [
            place | {"rank": int(rank), "process": number, "device": device}
            for rank, device in process["devices"].items()
        ]
    return sorted(ranks, key=lambda each: int(each["rank"]))


JAX = JaxFramework()
