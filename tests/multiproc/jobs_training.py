"""What the ranks of a pool do in the tests of training together."""

import hashlib
import importlib
from pathlib import Path
from typing import Any

import torch

from lockstep.core.config import merge
from lockstep.core.errors import RunError
from lockstep.core.interrupts import StopReason
from lockstep.core.registry import load
from lockstep.core.types import Comm
from lockstep.distributed.torch_comm import GroupComm
from lockstep.learn.config import TrainConfig, split_evenly
from lockstep.learn.torch import loop
from lockstep.learn.torch.evaluation import evaluate, summarise
from lockstep.learn.torch.training import Training
from lockstep.recipes.catalog import TASKS
from lockstep.session.make_env import build_share

Result = dict[str, Any]


def config_of(settings: dict[str, Any], task: str = "cartpole_swingup") -> TrainConfig:
    """Return the recipe of a task in float64 with settings changed."""
    base = {"device": "cpu", "dtype": "float64", "env": {"num_physics_threads": 1}}
    agent = {"num_mini_batches": 4} | settings.get("agent", {})
    recipe: TrainConfig = load(TASKS.get(task).recipe)()
    return merge(recipe, base | settings | {"agent": agent})


def training_on(comm: Comm, config: TrainConfig) -> Training:
    """Return this rank's part of a training."""
    shares = config.envs_by_rank(comm.world_size)
    env = build_share(config, shares, comm.rank)
    return Training(config, env, comm)


def result_of(training: Training, curve: list[dict[str, Any]]) -> Result:
    """Return what a training has learned, small enough to compare."""
    return {"curve": curve, "policy": training.policy.state_dict(), "digest": digest(training)}


def digest(training: Training) -> str:
    """Return a hash over the bits of all replicated state."""
    found = hashlib.sha256()
    for name, tensor in training.replicated_state().items():
        found.update(name.encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(
    comm: Comm,
    settings: dict[str, Any],
    num_iterations: int,
    task: str = "cartpole_swingup",
    resume: Path | None = None,
    save: Path | None = None,
) -> Result:
    """Train for some iterations, from a checkpoint that rank 0 alone reads if ``resume`` is given."""
    training = training_on(comm, config_of(settings, task))
    if resume is not None:
        training.load_state_dict(torch.load(resume, weights_only=True) if comm.rank == 0 else None, resume)
    curve = [training.iterate() for _ in range(num_iterations)]
    content = training.state_dict()
    if save is not None and comm.rank == 0:
        torch.save(content, save)
    training.env.close()
    return result_of(training, curve)


def count_collectives(comm: GroupComm, settings: dict[str, Any]) -> dict[str, Any]:
    """Return how many exchanges an iteration makes, and how many of them in the rollout."""
    module: Any = importlib.import_module("lockstep.learn.torch.training")
    training = training_on(comm, config_of(settings))
    collectives = comm.collectives
    in_rollout: list[int] = []
    collect = module.collect

    def counted(*arguments: Any) -> Any:
        before = collectives.num_started
        result = collect(*arguments)
        in_rollout.append(collectives.num_started - before)
        return result

    module.collect = counted
    try:
        training.iterate()
        before = collectives.num_started
        training.iterate()
        return {"iteration": collectives.num_started - before, "rollout": in_rollout[-1]}
    finally:
        module.collect = collect
        training.env.close()


class Silent:
    """An observer of nothing."""

    stop_requested = None
    save_due = False

    def record(self, metrics: Any) -> None: ...

    def save(self, iteration: int, content: Any) -> None: ...

    def save_failure(self, iteration: int, content: Any) -> None: ...


def train_with_a_difference(comm: Comm, name: str, rank: int, iteration: int) -> str:
    """Flip the last bit of a tensor on one rank at the end of an iteration; return what ends the training."""
    settings = {"num_envs": 4, "max_iterations": 20, "sentinel_interval": 2}
    training = training_on(comm, config_of(settings, "cartpole_classic"))
    iterate = training.iterate

    def iterate_and_plant(*arguments: Any) -> Any:
        metrics = iterate(*arguments)
        if (comm.rank, training.iteration) == (rank, iteration):
            tensor = training.replicated_state()[name]
            tensor.detach().view(-1).view(torch.uint8)[0] ^= 1
        return metrics

    training.iterate = iterate_and_plant  # type: ignore[assignment]
    try:
        return str(loop.train(training, Silent()))
    except RunError as error:
        return str(error)


def stop_where_asked(comm: Comm, rank: int, reason: StopReason) -> tuple[int, str | None]:
    """Let one rank ask for an end during its second iteration; return when this one stopped, and why."""
    training = training_on(comm, config_of({"num_envs": 4}, "cartpole_classic"))
    while training.stop_agreed is None and training.iteration < 5:
        wanted = reason if (comm.rank, training.iteration) == (rank, 1) else None
        training.iterate(lambda wanted=wanted: wanted)  # type: ignore[misc]
    return training.iteration, training.stop_agreed


def evaluation(comm: Comm, num_episodes: int) -> dict[str, Any]:
    """Return an evaluation of a new policy, and how many env steps this rank made for it."""
    config = config_of({"num_envs": 8})
    training = training_on(comm, config)
    shares = split_evenly(num_episodes, comm.world_size)
    env = build_share(config, shares, comm.rank, "evaluation")
    summary = summarise(evaluate(training.policy, env), comm)
    num_steps = env.num_steps * env.num_envs
    env.close()
    training.env.close()
    return {"summary": summary, "num_steps": num_steps}
