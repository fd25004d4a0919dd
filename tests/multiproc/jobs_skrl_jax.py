"""One of two processes that train by skrl's agents on JAX, whose observations and numbers of envs differ.

Run as ``python -m tests.multiproc.jobs_skrl_jax PORT PROCESS``; prints what it found, in JSON, as its last line.
"""

import copy
import hashlib
import json
import sys
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core.errors import UsageError
from lockstep.distributed.jax_comm import JaxComm
from lockstep.distributed.jax_group import _store
from lockstep.distributed.jax_guests import Exchange
from lockstep.distributed.jax_mesh import RankMesh, make_mesh
from lockstep.distributed.jax_sentinel import Sentinel
from lockstep.learn.jax.guest import GuestTraining
from lockstep.recipes.catalog import make_task
from tests.unit.skrl_jax_fixtures import PPO, SAC, config_with, training_of

SHARES = (12, 4)


def shifted_training(
    settings: dict[str, Any], ranks: RankMesh, comm: JaxComm, resources: ExitStack
) -> tuple[GuestTraining, list[np.ndarray]]:
    """Return a training whose second rank sees everything 3 higher, and a list that gets what this rank sees."""
    config = config_with(**settings, num_envs=SHARES)
    task = copy.copy(make_task(config))
    plain, shift = task.observations, 3.0 * comm.rank

    def observations(xp: Any, state: Any, noise: Any) -> Any:
        return {name: array + shift for name, array in plain(xp, state, noise).items()}

    task.observations = observations  # type: ignore[method-assign]
    training = training_of(config, resources, task=task, ranks=ranks, comm=comm)
    seen: list[np.ndarray] = []
    learner: Any = training.learner
    record = learner.agent.record_transition

    def record_and_see(**named: Any) -> None:
        seen.append(np.asarray(named["observations"], np.float64))
        record(**named)

    learner.agent.record_transition = record_and_see
    return training, seen


def run(settings: dict[str, Any], ranks: RankMesh, comm: JaxComm) -> dict[str, Any]:
    """Train, and train on; go back to where rank 0 alone has the content of, and train on again."""
    with ExitStack() as resources:
        training, seen = shifted_training(settings, ranks, comm, resources)
        metrics = [training.iterate() for _ in range(4)]
        content = training.state_dict()
        metrics.append(training.iterate())
        waits = training.own_times.waits if training.own_times else ()
        Sentinel(ranks, 1, comm.gather_text).check(5, training.replicated)
        state: Any = training.learner.state()
        rows = digest(training.state_dict()["sharded"])
        num_seen = len(seen)
        training.load_state_dict(content if comm.rank == 0 else None, "content")
        training.iterate()
        return {
            "state": {name: digest(state[name]) for name in state},
            "again": {name: digest(value) for name, value in training.learner.state().items()},
            "rows": [rows, digest(training.state_dict()["sharded"])],
            "moments": {
                name: np.asarray(value).tolist() for name, value in state["normalizers"]["observation"].items()
            },
            "seen": np.concatenate(seen[:num_seen]).tolist(),
            "metrics": [
                {name: record.get(name) for name in ("env_steps", "learning_rate", "kl", "loss/policy")}
                for record in metrics
            ],
            "waits": [wait.tag for wait in waits],
        }


def digest(tree: Any) -> str:
    """Return a hash of all arrays of a tree."""
    arrays = [np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"|".join(arrays)).hexdigest()


def means(ranks: RankMesh, comm: JaxComm) -> dict[str, Any]:
    """Return means of numbers that one rank has of 3 samples and the other of 1, or of none."""
    own = {"a": jnp.array([[1.0, 5.0][comm.rank]]), "b": jnp.full((2, 2), [2.0, 6.0][comm.rank])}
    mean = Exchange(ranks, (0.75, 0.25)[comm.rank]).mean(own, "numbers")
    nothing = {"a": jnp.array([[1.0, jnp.nan][comm.rank]])}
    of_one = Exchange(ranks, (1.0, 0.0)[comm.rank]).mean(nothing, "numbers")
    rows = Exchange(ranks, 0.5).gather(np.array([1.0 + comm.rank, 0.1]), "rows")
    return {"mean": jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, mean)), "rows": rows.tolist()} | {
        "of one": float(of_one["a"][0])
    }


def refusal(ranks: RankMesh, comm: JaxComm) -> str:
    """Return why a rank without envs is refused."""
    try:
        with ExitStack() as resources:
            training_of(config_with(**PPO, num_envs=(16, 0)), resources, ranks=ranks, comm=comm)
    except UsageError as error:
        return str(error)
    return ""


def main(port: str, process: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
    ranks = make_mesh()
    comm = JaxComm(process, 2, 2, _store())
    with jax.enable_x64(True):
        found: dict[str, Any] = {
            "ppo": run(PPO, ranks, comm),
            "sac": run(SAC, ranks, comm),
            "means": means(ranks, comm),
        }
        found["refusal"] = refusal(ranks, comm)
    print(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
