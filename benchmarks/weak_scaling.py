"""Weak scaling on the cores of one machine: ranks that train one policy together against as many that train alone.

    .venv/bin/python benchmarks/weak_scaling.py [--num_ranks 2] [--starts 5] [--rounds 5] [--save]
    .venv/bin/python benchmarks/weak_scaling.py --ml_framework jax --save

Every start makes all processes anew, since a process keeps the places in memory that it happened to get. Every process
is pinned to a core of its own with one thread, and works only while it is asked. In each round the ranks of one job run
some iterations; then as many independent jobs of one rank run the same, on the same cores at the same time; then one of
those alone, the other cores idle. Who begins alternates. Efficiency is the job's env steps per second over the sum of
those of the independent jobs, round by round: what the cores give when all are busy, with and without exchanges. The
raw figure beside it is the job's rate over ``num_ranks`` times that of one rank with the machine to itself, which also
counts what busy cores take from each other. With JAX there is one more side: as many devices of a single process, which
has all of the cores.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lockstep.core.config import merge
from lockstep.core.environment import describe
from lockstep.core.registry import load
from lockstep.learn.config import TrainConfig
from lockstep.learn.observer import Metrics
from lockstep.recipes.catalog import TASKS

FOLDER = Path(__file__).resolve().parent
Answer = dict[str, float]


class Rank:
    """A process of a job, pinned to cores."""

    def __init__(self, cores: list[int], rank: int, world_size: int, port: int, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, cores, rank, world_size, port, settings), daemon=True
        )
        self._process.start()

    def ask(self, num_iterations: int) -> None:
        """Let it run; ``answer`` waits."""
        self._connection.send(num_iterations)

    def answer(self) -> Answer:
        """Return ``env_steps``, ``wall_s`` and ``wait_s`` of what it was asked for."""
        answer: Answer = self._connection.recv()
        return answer

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.join()


def serve(
    connection: Connection, cores: list[int], rank: int, world_size: int, port: int, settings: dict[str, Any]
) -> None:
    """Train whenever asked, until the other end is closed."""
    os.sched_setaffinity(0, cores)
    os.environ |= {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCKSTEP_PIN": "0"}
    make = jax_training if settings["ml_framework"] == "jax" else torch_training
    config = merge(load(TASKS.get(settings["task"]).recipe)(), settings)
    iterate, num_envs = make(config)
    while True:
        try:
            num_iterations = connection.recv()
        except EOFError:
            return
        began, wait_s = time.perf_counter(), 0.0
        for _ in range(num_iterations):
            wait_s += float(iterate().get("time/wait_mean") or 0.0)
        env_steps = num_envs * config.agent.num_steps_per_env * num_iterations
        connection.send({"env_steps": env_steps, "wall_s": time.perf_counter() - began, "wait_s": wait_s})


def torch_training(config: TrainConfig) -> tuple[Callable[[], Metrics], int]:
    """Return what runs an iteration, and the envs of this process."""
    import torch

    from lockstep.distributed.torch_group import join
    from lockstep.learn.torch.training import Training
    from lockstep.session.make_env import build_share
    from lockstep.session.process import keep_large_buffers

    torch.set_num_threads(1)
    keep_large_buffers()
    comm = join(torch.device("cpu"))
    env = build_share(config, config.envs_by_rank(comm.world_size), comm.rank)
    return Training(config, env, comm).iterate, env.num_envs


def jax_training(config: TrainConfig) -> tuple[Callable[[], Metrics], int]:
    """Return what runs an iteration, and the envs of this process."""
    os.environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    import jax

    from lockstep.session.jax_session import JAX
    from lockstep.session.process import keep_large_buffers

    keep_large_buffers()
    team = JAX.join(config)
    jax.config.update("jax_enable_x64", True)  # for counts, as JAX.running() does
    training = JAX.make_learner(config, team, ExitStack()).runner
    shares = config.envs_by_rank(team.mesh.num_ranks)
    return training.iterate, sum(shares[rank] for rank in team.mesh.local_ranks)


def run(ranks: Sequence[Rank], num_iterations: int) -> list[Answer]:
    """Let several work at the same time."""
    for rank in ranks:
        rank.ask(num_iterations)
    return [rank.answer() for rank in ranks]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start(arguments: argparse.Namespace, settings: dict[str, Any]) -> dict[str, list[Rank]]:
    """Start all processes; return those of each side."""
    cores, count = sorted(os.sched_getaffinity(0))[: arguments.num_ranks], arguments.num_ranks
    port = free_port()
    sides = {
        "together": [Rank([core], rank, count, port, settings) for rank, core in enumerate(cores)],
        "apart": [Rank([core], 0, 1, 0, settings) for core in cores],
    }
    sides["alone"] = sides["apart"][:1]
    if arguments.ml_framework == "jax":
        sides["devices"] = [Rank(cores, 0, 1, 0, settings | {"num_devices": count})]
    return sides


def measure(arguments: argparse.Namespace, settings: dict[str, Any]) -> list[dict[str, float]]:
    """Return the rates (env steps/s) and the share of waiting of every round."""
    count, sides = arguments.num_ranks, start(arguments, settings)
    rounds: list[dict[str, float]] = []
    try:
        for ranks in sides.values():
            run(ranks, arguments.warm_up)
        for number in range(arguments.rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            answers = {name: run(sides[name], arguments.iterations) for name in order}
            rates = {name: rate_of_job(own) for name, own in answers.items()}
            # Independent jobs: the sum of their rates.
            rates["apart"] = sum(answer["env_steps"] / answer["wall_s"] for answer in answers["apart"])
            rates["efficiency"] = rates["together"] / rates["apart"]
            if "devices" in rates:
                rates["devices_efficiency"] = rates["devices"] / rates["apart"]
            rates["raw"] = rates["together"] / (count * rates["alone"])
            rates["wait"] = statistics.mean(answer["wait_s"] / answer["wall_s"] for answer in answers["together"])
            rounds.append(rates)
            shown = ", ".join(f"{name} {rates[name]:,.0f}/s" for name in sides)
            print(f"round {number + 1}/{arguments.rounds}: {shown}, efficiency {rates['efficiency']:.3f}", flush=True)
    finally:
        for rank in [rank for name, ranks in sides.items() if name != "alone" for rank in ranks]:
            rank.close()
    return rounds


def rate_of_job(answers: list[Answer]) -> float:
    """Return all env steps of a job over the time of its slowest process."""
    return sum(answer["env_steps"] for answer in answers) / max(answer["wall_s"] for answer in answers)


def spread(rounds: list[dict[str, float]], name: str, form: str) -> str:
    values = [each[name] for each in rounds]
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


def main() -> None:
    arguments = parse()
    framework = arguments.ml_framework
    settings: dict[str, Any] = {"task": arguments.task, "device": "cpu", "num_envs": arguments.num_envs}
    settings |= {"ml_framework": framework} | ({"num_devices": 1} if framework == "jax" else {})
    load_before = os.getloadavg()[0]
    starts = [measure(arguments, settings) for _ in range(arguments.starts)]
    rounds = [each for start in starts for each in start]
    by_start = ", ".join(f"{statistics.median(each['efficiency'] for each in start):.3f}" for start in starts)
    machine = describe()
    git = machine["git"]["lockstep"] or {"commit": "unknown", "dirty": False}
    facts = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/weak_scaling.py", *sys.argv[1:]]),
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version),
        "commit": git["commit"] + (" with changes" if git["dirty"] else ""),
        "CPU": f"{machine['hardware']['cpu']}, {arguments.num_ranks} of {machine['hardware']['num_cores']} cores",
        "load of the host": f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after",
        "workload": f"{arguments.task}, {arguments.num_envs} envs per rank, otherwise its recipe, {framework}, gloo",
        "rounds": f"{arguments.starts} starts of {arguments.rounds} rounds of {arguments.iterations} iterations, "
        f"{arguments.warm_up} iterations before that",
        f"{arguments.num_ranks} ranks together, env steps/s": spread(rounds, "together", ",.0f"),
        f"{arguments.num_ranks} independent jobs, env steps/s in all": spread(rounds, "apart", ",.0f"),
        "one job, other cores idle, env steps/s": spread(rounds, "alone", ",.0f"),
        "efficiency (together / independent)": spread(rounds, "efficiency", ".3f"),
        "its median in each start": by_start,
        f"raw (together / {arguments.num_ranks} x one job with the machine to itself)": spread(rounds, "raw", ".3f"),
    }
    if framework == "torch":
        facts["share of the time in exchanges, waiting included"] = spread(rounds, "wait", ".1%")
    else:
        facts[f"one process with {arguments.num_ranks} devices, env steps/s"] = spread(rounds, "devices", ",.0f")
        facts["its efficiency (that / independent)"] = spread(rounds, "devices_efficiency", ".3f")
    print("\n" + "\n".join(f"{name}: {value}" for name, value in facts.items()))
    if arguments.save:
        path = FOLDER / "scaling" / (f"weak_{facts['date']}" + ("" if framework == "torch" else f"_{framework}"))
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps({"facts": facts, "rounds": rounds}, indent=1) + "\n")
        lines = ["# Weak scaling on one machine", "", "Median over rounds (lowest .. highest).", ""]
        lines += [f"- {name}: {value}" for name, value in facts.items()]
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cartpole_classic")
    parser.add_argument("--ml_framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--num_envs", type=int, default=4096, help="per rank")
    parser.add_argument("--num_ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=5, help="of all processes")
    parser.add_argument("--rounds", type=int, default=5, help="per start")
    parser.add_argument("--iterations", type=int, default=5, help="per round")
    parser.add_argument("--warm_up", type=int, default=4, help="iterations that are not counted")
    parser.add_argument("--save", action="store_true", help="write benchmarks/scaling/weak_<date>.json and .md")
    arguments = parser.parse_args()
    if not 2 <= arguments.num_ranks <= len(os.sched_getaffinity(0)):
        parser.error(f"--num_ranks must be 2 to {len(os.sched_getaffinity(0))}, a core for each")
    return arguments


if __name__ == "__main__":
    main()
