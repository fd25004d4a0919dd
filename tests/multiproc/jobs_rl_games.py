"""What the ranks of a pool do in the tests of rl_games' learner: unequal ranks, and one process with all samples."""

import copy
from typing import Any

import torch

from lockstep.adapters.rl_games.learner import RlGamesLearner
from lockstep.core.types import Comm
from lockstep.distributed.torch_comm import SoloComm
from lockstep.distributed.torch_guests import guest_group
from lockstep.session.make_env import build_share
from tests.multiproc.jobs_training import digest
from tests.multiproc.shifted_envs import ShiftedEnvs
from tests.unit.rl_games_fixtures import config_with, training_of


def iterate_shifted(comm: Comm, settings: dict[str, Any], num_iterations: int) -> dict[str, Any]:
    """Return what is left after some iterations whose observations differ by rank."""
    torch.set_num_threads(1)
    config = config_with(**settings)
    env = ShiftedEnvs(build_share(config, config.envs_by_rank(comm.world_size), comm.rank), 3.0 * comm.rank)
    training = training_of(config, comm, env)
    metrics = [training.iterate() for _ in range(num_iterations)]
    agent = training.learner.agent
    normalizers = {"actor": agent.plain_model.running_mean_std}
    if agent.has_central_value:
        normalizers["critic"] = agent.plain_central_value.running_mean_std
    return {
        "digest": digest(training),
        "metrics": metrics,
        "learning_rate": agent.optimizer.param_groups[0]["lr"],
        "seen": {group: torch.cat([each[group] for each in env.seen]).tolist() for group in normalizers},
        "moments": {
            group: (each.count.item(), each.running_mean.tolist(), each.running_var.tolist())
            for group, each in normalizers.items()
        },
    }


def one_update_apart(comm: Comm, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters after one update by all ranks, and by one process that has all their samples."""
    config = config_with(**settings)
    learner = training_of(config, comm).learner
    with guest_group(comm):
        state = copy.deepcopy(learner.state_dict())
        learner.collect()
        batch = learner.agent._batch
        rows = {name: comm.gather_rows(each, "test") for name, each in batch.items() if torch.is_tensor(each)}
        seen = learner.agent.experience_buffer.tensor_dict
        seen = {
            name: comm.gather_rows(seen[name].transpose(0, 1).contiguous(), "test").transpose(0, 1)
            for name in ("obses", "states")
            if name in seen
        }
        learner.update()
        learner.merge()
    together = _learned(learner)
    if comm.rank:
        return {"together": together}
    total = config.model_copy(update={"num_envs": sum(config.envs_by_rank(comm.world_size))})
    alone = RlGamesLearner(total, build_share(total, (int(total.num_envs),), 0), SoloComm())  # type: ignore[arg-type]
    alone.load_state_dict(state)
    alone.collect()  # so that everything is in its place
    alone.agent._batch |= rows
    alone.agent.experience_buffer.tensor_dict |= seen
    alone.update()
    alone.merge()
    return {"together": together, "alone": _learned(alone)}


def _learned(learner: Any) -> dict[str, list[float]]:
    found = {"learning_rate": [float(learner.agent.last_lr)]}
    for name in ("model", "central value"):
        module = learner.replicated().get(name)
        if module is not None:
            found |= {f"{name}.{path}": tensor.flatten().tolist() for path, tensor in module.state_dict().items()}
    return found


def train_on(comm: Comm, settings: dict[str, Any], num_iterations: int) -> tuple[str, dict[str, Any]]:
    """Return the digest and the content of a checkpoint after some iterations."""
    training = training_of(config_with(**settings), comm)
    for _ in range(num_iterations):
        training.iterate()
    return digest(training), training.state_dict()


def go_on(comm: Comm, settings: dict[str, Any], content: dict[str, Any]) -> tuple[str, str]:
    """Return the digests of a training that rank 0 alone has read, as it is and after one more iteration."""
    training = training_of(config_with(**settings), comm)
    training.load_state_dict(content if comm.rank == 0 else None, "model.pt")
    loaded = digest(training)
    training.iterate()
    return loaded, digest(training)
