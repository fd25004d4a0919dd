"""What the ranks of a pool do in the tests of RSL-RL's learners: unequal ranks, and one process with all samples."""

import copy
import itertools
from pathlib import Path
from typing import Any

import torch

from lockstep.adapters.rsl_rl.learner import RslRlLearner
from lockstep.core.types import Comm
from lockstep.distributed.torch_comm import GroupComm, SoloComm
from lockstep.distributed.torch_guests import guest_group
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.guest import GuestTraining
from lockstep.session.make_env import build_share
from tests.multiproc.jobs_training import digest
from tests.multiproc.shifted_envs import ShiftedEnvs
from tests.unit.rsl_rl_fixtures import config_with, training_of

_STORED = ("actions", "values", "returns", "advantages", "actions_log_prob", "rewards", "dones")


def _shifted_training(comm: Comm, settings: dict[str, Any]) -> tuple[GuestTraining, ShiftedEnvs]:
    torch.set_num_threads(1)
    config = config_with(**settings)
    env = ShiftedEnvs(build_share(config, config.envs_by_rank(comm.world_size), comm.rank), 3.0 * comm.rank)
    training: Any = GuestTraining("lockstep.adapters.rsl_rl.learner:RslRlLearner", config, env, comm)  # type: ignore[arg-type]
    return training, env


def iterate_shifted(comm: Comm, settings: dict[str, Any], num_iterations: int) -> dict[str, Any]:
    """Return what is left after some iterations whose observations differ by rank."""
    training, env = _shifted_training(comm, settings)
    metrics = [training.iterate() for _ in range(num_iterations)]
    algorithm = training.learner.algorithm  # type: ignore[attr-defined]
    normalizer = algorithm.get_policy().obs_normalizer
    return {
        "digest": digest(training),  # type: ignore[arg-type]
        "metrics": metrics,
        "learning_rate": algorithm.learning_rate,
        "seen": torch.cat([each["actor"] for each in env.seen]).tolist(),
        "moments": (normalizer._mean.tolist(), normalizer._std.tolist(), int(normalizer.count)),
    }


def one_update_apart(comm: Comm, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters after one update by all ranks, and by one process that has all their samples."""
    config = config_with(**settings)
    learner: Any = training_of(config, comm).learner
    with guest_group(comm):
        state = copy.deepcopy(learner.state_dict())
        learner.collect()
        rows = {name: _rows(getattr(learner.algorithm.storage, name), comm) for name in _STORED}
        distribution = [_rows(each, comm) for each in learner.algorithm.storage.distribution_params]
        observations = {name: _rows(each, comm) for name, each in learner.algorithm.storage.observations.items()}
        learner.update()
        learner.merge()
    together = _learned(learner)
    if comm.rank:
        return {"together": together}
    total = sum(config.envs_by_rank(comm.world_size))
    alone = _alone(config.model_copy(update={"num_envs": total}), state)
    storage = alone.algorithm.storage
    for name, each in rows.items():
        setattr(storage, name, each)
    storage.distribution_params = tuple(distribution)
    for name, each in observations.items():
        storage.observations[name] = each
    alone.update()
    alone.merge()
    return {"together": together, "alone": _learned(alone)}


def _alone(config: TrainConfig, state: dict[str, Any]) -> Any:
    learner: Any = RslRlLearner(config, build_share(config, (int(config.num_envs),), 0), SoloComm())  # type: ignore[arg-type]
    learner.load_state_dict(state)
    learner.collect()  # so that everything is in its place
    return learner


def _rows(tensor: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Return on rank 0 ``(num_steps, num_envs of all, ...)``."""
    return comm.gather_rows(tensor.transpose(0, 1).contiguous(), "test").transpose(0, 1).contiguous()


def _learned(learner: Any) -> dict[str, list[float]]:
    found = {"learning_rate": [learner.algorithm.learning_rate]}
    for model, module in learner.algorithm.models().items():
        found |= {f"{model}.{name}": tensor.flatten().tolist() for name, tensor in module.state_dict().items()}
    return found


def count_exchanges(comm: GroupComm, settings: dict[str, Any]) -> tuple[int, int, int]:
    """Return how many exchanges there are in a rollout, in an update and in the merge after it."""
    learner: Any = training_of(config_with(**settings), comm).learner
    with guest_group(comm):
        for work in (learner.collect, learner.update, learner.merge):
            work()  # the first update compares the parameters of ranks
        numbers = [comm.collectives.num_started]
        for work in (learner.collect, learner.update, learner.merge):
            work()
            numbers.append(comm.collectives.num_started)
    first, second, third = (after - before for before, after in itertools.pairwise(numbers))
    return first, second, third


def go_on(comm: Comm, settings: dict[str, Any], content: dict[str, Any] | None) -> tuple[str, str]:
    """Return the digests of a training that rank 0 alone has read, as it is and after one more iteration."""
    training = training_of(config_with(**settings), comm)
    training.load_state_dict(content if comm.rank == 0 else None, "model_1.pt")
    loaded = digest(training)  # type: ignore[arg-type]
    training.iterate()
    return loaded, digest(training)  # type: ignore[arg-type]


def train_on(comm: Comm, settings: dict[str, Any], num_iterations: int) -> tuple[str, dict[str, Any]]:
    """Return the digest and the content of a checkpoint after some iterations."""
    training = training_of(config_with(**settings), comm)
    for _ in range(num_iterations):
        training.iterate()
    return digest(training), training.state_dict()  # type: ignore[arg-type]


def distil(comm: Comm, teacher: Path) -> tuple[str, float]:
    """Return the digest of a student after some iterations, and how much smaller its loss has become."""
    settings = {
        "algorithm": "distillation",
        "num_envs": (6, 2),
        "agent": {"teacher": str(teacher), "learning_rate": 3e-3},
    }
    training, _ = _shifted_training(comm, settings)
    losses = [training.iterate()["loss/behavior"] or 0.0 for _ in range(20)]
    return digest(training), losses[-1] / losses[0]  # type: ignore[arg-type]
