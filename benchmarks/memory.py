"""How much memory a training takes, and whether it grows.

    .venv/bin/python benchmarks/memory.py [quadruped_velocity_flat] [--num_envs 4096] [--iterations 500] [--save]

Two trainings with the task's recipe, each in a process of its own on the CPU. The first runs a few iterations as they
are and tells the most that the process ever had (``ru_maxrss``, imports included). The second runs many iterations of
short rollouts and few passes, so that it comes to so many, and tells what it has after each tenth of them.
"""

import argparse
import json
import multiprocessing
import resource
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from lockstep.core.config import merge
from lockstep.core.environment import describe
from lockstep.recipes.catalog import recipe_of

FOLDER = Path(__file__).resolve().parent / "memory"
SHORT = {"num_steps_per_env": 2, "num_learning_epochs": 1}
MIB = 2**20


def measure(task: str, num_envs: int, agent: dict[str, Any], num_iterations: int) -> tuple[float, list[float]]:
    """Train; return the most MiB there ever were, and what there was after each tenth of the iterations."""
    from lockstep.distributed.torch_comm import SoloComm
    from lockstep.learn.torch.training import Training
    from lockstep.session.make_env import build_env
    from lockstep.session.process import prepare

    config = merge(recipe_of(task), {"device": "cpu", "num_envs": num_envs, "agent": agent})
    prepare(config, 0)
    training = Training(config, build_env(config), SoloComm())
    process = psutil.Process()
    had = []
    for iteration in range(1, num_iterations + 1):
        training.iterate()
        if iteration % max(1, num_iterations // 10) == 0:
            had.append(round(process.memory_info().rss / MIB, 1))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, had  # KiB on Linux


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="quadruped_velocity_flat")
    parser.add_argument("--num_envs", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=500, help="of the second training")
    parser.add_argument("--save", action="store_true", help="store into benchmarks/memory")
    arguments = parser.parse_args()
    shapes: dict[str, tuple[dict[str, Any], int]] = {"recipe": ({}, 3), "short": (SHORT, arguments.iterations)}
    context = multiprocessing.get_context("spawn")
    found = {}
    for name, (agent, num_iterations) in shapes.items():
        with context.Pool(1) as pool:
            found[name] = pool.apply(measure, (arguments.task, arguments.num_envs, agent, num_iterations))
    about = describe()
    record = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/memory.py", *sys.argv[1:]]),
        "task": arguments.task,
        "num_envs": arguments.num_envs,
        "peak_mib": round(found["recipe"][0]),
        "iterations": arguments.iterations,
        "mib_after_each_tenth": found["short"][1],
        "versions": about["versions"],
        "commit": about["git"]["lockstep"],
        "cpu": f"{about['hardware']['cpu']}, {about['hardware']['num_allowed_cores']} cores",
    }
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.save:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{arguments.task}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
