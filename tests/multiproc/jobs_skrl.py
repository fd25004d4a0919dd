"""What the ranks of a pool do in the tests of skrl's agents with torch: unequal ranks, and one with all samples."""

import copy
from typing import Any

import torch

from lockstep.core.errors import UsageError
from lockstep.core.types import Comm
from lockstep.distributed.torch_comm import SoloComm
from lockstep.distributed.torch_guests import guest_group
from lockstep.session.make_env import build_share
from tests.multiproc.jobs_training import digest
from tests.multiproc.shifted_envs import ShiftedEnvs
from tests.unit.skrl_fixtures import config_with, training_of


def iterate_shifted(comm: Comm, settings: dict[str, Any], num_iterations: int) -> dict[str, Any]:
    """Return what is left after some iterations whose observations differ by rank."""
    config = config_with(**settings)
    env = ShiftedEnvs(build_share(config, config.envs_by_rank(comm.world_size), comm.rank), 3.0 * comm.rank)
    training = training_of(config, comm, env)
    before = {name: tensor.clone() for name, tensor in training.replicated_state().items()}
    metrics = [training.iterate() for _ in range(num_iterations)]
    after = training.replicated_state()
    modules = training.learner.agent.checkpoint_modules
    scaler = modules["observation_preprocessor"]
    return {
        "digest": digest(training),
        "metrics": metrics[-1],
        "changed": sorted({name.split(".")[0].split(" ")[0] for name in after if not _is_same(name, before, after)}),
        "seen": torch.cat([each["actor"] for each in env.seen]).tolist(),
        "moments": (scaler.current_count.item(), scaler.running_mean.tolist(), scaler.running_variance.tolist()),
    }


def _is_same(name: str, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return name in before and before[name].equal(after[name])


def one_update_apart(comm: Comm, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters after one update by all ranks, and by one process that has all their samples.

    In that process the library does what it always does alone: nothing of what is mended here is in its way.
    """
    config = config_with(**settings)
    learner = training_of(config, comm).learner
    with guest_group(comm):
        state = copy.deepcopy(learner.state_dict())
        learner.collect()
        last = {"observations": "_current_next_observations", "states": "_current_next_states"}
        rows = {name: tensor.transpose(0, 1) for name, tensor in learner.agent.memory.tensors.items()}
        rows = {name: comm.gather_rows(tensor.contiguous(), "test").transpose(0, 1) for name, tensor in rows.items()}
        ends = {name: comm.gather_rows(getattr(learner.agent, attribute), "test") for name, attribute in last.items()}
        learner.update()
    together = _weights(learner)
    if comm.rank:
        return {"together": together}
    total = config.model_copy(update={"num_envs": sum(config.envs_by_rank(comm.world_size))})
    # The library takes its word for whether there are several processes from the variables it was loaded with.
    from skrl import config as skrl_config

    skrl_config.torch._is_distributed, skrl_config.torch._world_size = False, 1
    try:
        alone = training_of(total, SoloComm()).learner
        alone.load_state_dict(state)
        alone.collect()  # so that everything is in its place
        for name, tensor in rows.items():
            alone.agent.memory.tensors[name].copy_(tensor)
        for name, attribute in last.items():
            setattr(alone.agent, attribute, ends[name])
        alone.update()
    finally:
        skrl_config.torch._is_distributed, skrl_config.torch._world_size = True, comm.world_size
    return {"together": together, "alone": _weights(alone)}


def _weights(learner: Any) -> dict[str, list[float]]:
    models = learner.agent.models.items()
    return {
        f"{name}.{path}": tensor.flatten().tolist()
        for name, model in models
        for path, tensor in model.state_dict().items()
    }


def train_on(comm: Comm, settings: dict[str, Any], num_iterations: int) -> tuple[str, dict[str, Any]]:
    """Return the digest and the content of a checkpoint after some iterations."""
    training = training_of(config_with(**settings), comm)
    for _ in range(num_iterations):
        training.iterate()
    return digest(training), training.state_dict()


def go_on(comm: Comm, settings: dict[str, Any], content: dict[str, Any], num_iterations: int) -> tuple[str, str]:
    """Return the digests of a training that rank 0 alone has read, as it is and after some more iterations."""
    training = training_of(config_with(**settings), comm)
    training.load_state_dict(content if comm.rank == 0 else None, "model.pt")
    loaded = digest(training)
    for _ in range(num_iterations):
        training.iterate()
    return loaded, digest(training)


def refusal(comm: Comm, settings: dict[str, Any]) -> str:
    """Return why a training is refused."""
    try:
        training_of(config_with(**settings), comm)
    except UsageError as error:
        return str(error)
    return ""
