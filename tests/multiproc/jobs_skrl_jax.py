"""One of two processes that train by skrl's agents on JAX, whose observations and numbers of envs differ.

The critic sees one number more than the actor, so that whoever takes one group for the other is found out.

Run as ``python -m tests.multiproc.jobs_skrl_jax PORT PROCESS``; prints what it found, in JSON, as its last line.
"""

import copy
import hashlib
import json
import math
import sys
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core.errors import RunError, UsageError
from lockstep.core.types import Task
from lockstep.distributed.jax_comm import JaxComm
from lockstep.distributed.jax_group import _store
from lockstep.distributed.jax_guests import Exchange
from lockstep.distributed.jax_mesh import RankMesh, make_mesh
from lockstep.distributed.jax_sentinel import Sentinel
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.guest import GuestTraining
from lockstep.learn.jax.loop import train
from lockstep.recipes.catalog import make_task
from tests.unit.jax_training_fixtures import Recorder
from tests.unit.skrl_jax_fixtures import PPO, SAC, config_with, training_of

SHARES = (12, 4)
GROUPS = {"observation": "observations", "state": "states"}
"""What the library's normalisers are called, and what they see."""


def seeing_task(config: TrainConfig, shift: float) -> Task:
    """Return the task of a config, with observations that are higher by a shift, and a number more for the critic."""
    task: Any = copy.copy(make_task(config))
    plain, sizes = task.observations, task.num_observations

    def observations(xp: Any, state: Any, noise: Any) -> Any:
        seen = {name: array + shift for name, array in plain(xp, state, noise).items()}
        return seen | {"critic": xp.concat((seen["critic"], 2.0 * seen["critic"][:, :1] - 1.0), axis=-1)}

    task.observations, task.num_observations = observations, dict(sizes) | {"critic": sizes["critic"] + 1}
    return task  # type: ignore[no-any-return]


def shifted_training(
    settings: dict[str, Any], ranks: RankMesh, comm: JaxComm, resources: ExitStack
) -> tuple[GuestTraining, dict[str, list[np.ndarray]]]:
    """Return a training whose second rank sees everything 3 higher, and lists that get what this rank sees."""
    config = config_with(**settings, num_envs=SHARES)
    task = seeing_task(config, 3.0 * comm.rank)
    training = training_of(config, resources, task=task, ranks=ranks, comm=comm)
    seen: dict[str, list[np.ndarray]] = {group: [] for group in GROUPS}
    learner: Any = training.learner
    record = learner.agent.record_transition

    def record_and_see(**named: Any) -> None:
        for group, name in GROUPS.items():
            seen[group].append(np.asarray(named[name], np.float64))
        record(**named)

    learner.agent.record_transition = record_and_see
    return training, seen


def own_divergences(training: GuestTraining) -> list[float]:
    """Return a list that gets the KL divergence of this rank's samples each time that it is pooled."""
    pool, own = training.learner._kl._pool, []  # type: ignore[attr-defined]

    def pool_and_keep(kl: Any) -> float:
        own.append(float(kl))
        return pool(kl)  # type: ignore[no-any-return]

    training.learner._kl._pool = pool_and_keep  # type: ignore[attr-defined]
    return own


def run(settings: dict[str, Any], ranks: RankMesh, comm: JaxComm) -> dict[str, Any]:
    """Train, and train on; go back to where rank 0 alone has the content of, and train on again."""
    with ExitStack() as resources:
        training, seen = shifted_training(settings, ranks, comm, resources)
        own_kl = own_divergences(training)
        metrics = [training.iterate() for _ in range(4)]
        content = training.state_dict()
        metrics.append(training.iterate())
        waits = training.own_times.waits if training.own_times else ()
        Sentinel(ranks, 1, comm.gather_text).check(5, training.replicated)
        state: Any = training.learner.state()
        rows = digest(training.state_dict()["sharded"])
        num_seen, kl = len(seen["state"]), list(own_kl)
        training.load_state_dict(content if comm.rank == 0 else None, "content")
        training.iterate()
        found = {
            "own kl": kl,
            "state": {name: digest(state[name]) for name in state},
            "again": {name: digest(value) for name, value in training.learner.state().items()},
            "rows": [rows, digest(training.state_dict()["sharded"])],
            "moments": {
                group: {name: np.asarray(value).tolist() for name, value in state["normalizers"][group].items()}
                for group in GROUPS
            },
            "seen": {group: np.concatenate(rows[:num_seen]).tolist() for group, rows in seen.items()},
            "metrics": [
                {name: record.get(name) for name in ("env_steps", "learning_rate", "kl", "loss/policy")}
                for record in metrics
            ],
            "waits": [wait.tag for wait in waits],
        }
        tried = BAD if settings is PPO else ()
        return found | {"bad": {what: bad_end(what, training, content, comm) for what in tried}}


BAD = ("a number", "a loss", "rewards", "a parameter")


def bad_end(what: str, training: GuestTraining, content: dict[str, Any], comm: JaxComm) -> Any:
    """Return what comes of something on the second rank that is not finite, or not that of the first."""
    training.load_state_dict(content if comm.rank == 0 else None, "content")
    agent = training.learner.agent  # type: ignore[attr-defined]
    if what == "a number":
        agent.track_data("Target / Target (mean)", math.inf if comm.rank else 1.0)
        return training.iterate()["skrl/target"]
    record = agent.record_transition
    if what == "a loss":
        agent.track_data("Loss / Policy loss", math.inf if comm.rank else 1.0)
    elif what == "rewards" and comm.rank:

        def record_too_much(**named: Any) -> None:
            record(**named | {"rewards": named["rewards"] * jnp.inf})

        agent.record_transition = record_too_much
    elif what == "a parameter" and comm.rank:
        policy = agent.policy
        lower = jax.tree.map(lambda leaf: leaf - 1e-3, policy.state_dict.params["params"]["log_std"])
        parameters = {"params": {**policy.state_dict.params["params"], "log_std": lower}}
        policy.state_dict = policy.state_dict.replace(params=parameters)
    try:
        train(training, Recorder())
    except RunError as error:
        return str(error)
    finally:
        agent.record_transition = record
        agent.tracking_data.clear()
    return ""


def update_apart(library: dict[str, Any], ranks: RankMesh, comm: JaxComm) -> dict[str, Any]:
    """Return the parameters after one update by both ranks, and by one process that has all their samples."""
    agent = PPO["agent"] | {"num_mini_batches": 1, "num_learning_epochs": 4, "schedule": "fixed"}
    settings = {"agent": agent, "library": library}
    with ExitStack() as resources:
        config = config_with(**settings, num_envs=SHARES)
        training = training_of(config, resources, task=seeing_task(config, 0.0), ranks=ranks, comm=comm)
        state = training._plain(training.learner.state())
        together, rows = one_update(training, comm)
        if comm.rank:
            return {"together": together}
        config = config_with(**settings)
        alone = training_of(config, resources, task=seeing_task(config, 0.0))
        alone._put(state)
        return {"together": together, "alone": one_update(alone, None, rows)[0]}


def one_update(training: GuestTraining, comm: JaxComm | None, rows: Any = None) -> tuple[Any, Any]:
    """Return the parameters after an update, and the samples of all ranks, or those given, which it is of."""
    learner: Any = training.learner
    agent = learner.agent
    last = ("_current_next_observations", "_current_next_states")
    with training._as_library():
        learner.collect(0)
        if comm is not None:
            own = {name: np.asarray(tensor).tolist() for name, tensor in agent.memory.tensors.items()}
            own |= {name: np.asarray(getattr(agent, name)).tolist() for name in last}
            every = [json.loads(text) for text in comm.gather_text(json.dumps(own), "test")]
            rows = {
                name: np.concatenate([np.array(each[name]) for each in every], int(name not in last)) for name in own
            }
        else:
            for name, tensor in agent.memory.tensors.items():
                agent.memory.tensors[name] = jnp.asarray(rows[name], tensor.dtype)
            for name in last:
                setattr(agent, name, jnp.asarray(rows[name], jnp.float32))
        learner.update()
    networks = training._plain(learner.state()["networks"])
    paths = jax.tree_util.tree_leaves_with_path(networks)
    return {jax.tree_util.keystr(path): leaf.flatten().tolist() for path, leaf in paths}, rows


def digest(tree: Any) -> str:
    """Return a hash of all arrays of a tree."""
    arrays = [np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"|".join(arrays)).hexdigest()


def means(ranks: RankMesh, comm: JaxComm) -> dict[str, Any]:
    """Return means of numbers that one rank has of 3 samples and the other of 1, or of none."""
    own = {"a": jnp.array([[1.0, 5.0][comm.rank]]), "b": jnp.full((2, 2), [2.0, 6.0][comm.rank])}
    mean = Exchange(ranks, (0.75, 0.25)[comm.rank]).mean(own, "numbers")
    nothing = {"a": jnp.array([[1.0, jnp.nan][comm.rank]])}
    one = Exchange(ranks, (1.0, 0.0)[comm.rank])
    of_one = one.mean(nothing, "numbers")
    exchange = Exchange(ranks, 0.5)
    rows = exchange.gather(np.array([1.0 + comm.rank, 0.1]), "rows")
    bad = [one.take_nonfinite(), exchange.take_nonfinite()]
    exchange.mean(nothing, "numbers")
    exchange.gather(np.array([np.nan]), "rows")
    bad += [exchange.take_nonfinite(), exchange.take_nonfinite()]
    return {
        "mean": jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, mean)),
        "of one": float(of_one["a"][0]),
        "rows": rows.tolist(),
        "bad": bad,
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
            "updates": [
                update_apart(library, ranks, comm) for library in ({}, {"value_preprocessor": "RunningStandardScaler"})
            ],
        }
        found["refusal"] = refusal(ranks, comm)
    print(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
