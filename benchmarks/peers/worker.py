"""One side in its own process: prepares itself, then trains whenever a line asks for it.

Talks JSON lines over stdin and the descriptor that was stdout; whatever a library prints goes to stderr.
"""

import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

import psutil
from workload import Side, Workload

from lockstep.session.process import keep_large_buffers

# Each library is imported where it is asked for: no environment has all.
SIDES = {
    "lockstep": "lockstep_side:LockstepSide",
    "lockstep_jax": "lockstep_jax_side:LockstepJaxSide",
    "rsl_rl": "rsl_rl_side:RslRlSide",
    "rl_games": "rl_games_side:RlGamesSide",
    "skrl": "skrl_side:SkrlSide",
    "sb3": "sb3_side:Sb3Side",
    "brax": "brax_side:BraxSide",
}


def make_side(request: dict[str, Any]) -> tuple[Side, dict[str, Any]]:
    """Build the side; return it with what is to be said of it."""
    os.sched_setaffinity(0, {request["core"]})
    kept = keep_large_buffers() if request["keep_large_buffers"] else False
    module, _, name = SIDES[request["library"]].partition(":")
    if not request["library"].startswith(("brax", "lockstep_jax")):
        import torch

        torch.set_num_threads(1)
    workload = Workload(**{**request["workload"], "hidden_dims": tuple(request["workload"]["hidden_dims"])})
    side: Side = getattr(importlib.import_module(module), name)(workload, **request["settings"])
    return side, {"keep_large_buffers": kept, "versions": side.versions | {"python": sys.version.split()[0]}}


def prepare(request: dict[str, Any]) -> tuple[Side, dict[str, Any]]:
    """Build the side and, to measure its speed, run its first iterations; say what one iteration does."""
    side, description = make_side(request)
    if request["warm_up"]:
        work = side.first_iteration()
        description |= {"work": work, "first_episode_length": side.evaluate()}
        side.iterate(request["warm_up"])
    return side, description


def run_round(side: Side, num_iterations: int) -> dict[str, Any]:
    steps, env_steps = side.num_optimizer_steps(), side.num_env_steps()
    cpu, wall = time.process_time(), time.perf_counter()
    side.iterate(num_iterations)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "num_iterations": num_iterations,
        "wall_s": wall,
        "cpu_s": cpu,
        "optimizer_steps": side.num_optimizer_steps() - steps,
        "env_steps": side.num_env_steps() - env_steps,
    }


def solve(side: Side, length: float, max_iterations: int) -> dict[str, Any]:
    """Train until an evaluation's mean episode length is so much; the time of evaluations does not count.

    ``wall_s`` begins when the process began: imports, building and compiling are part of it.
    """
    began = psutil.Process().create_time()
    evaluating_s, first_s, found, iteration = 0.0, 0.0, 0.0, 0
    while iteration < max_iterations and found < length:
        side.iterate(1)
        iteration += 1
        before = time.time()
        first_s = first_s or before - began
        found = side.evaluate()
        now = time.time()
        evaluating_s += now - before
    return {
        "wall_s": now - began - evaluating_s,
        "first_iteration_s": first_s,
        "iterations": iteration,
        "env_steps": side.num_env_steps(),
        "episode_length": found,
    }


def main() -> None:
    replies: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    side, description = prepare(json.loads(sys.stdin.readline()))
    reply(description)
    for line in sys.stdin:
        request = json.loads(line)
        if "num_iterations" in request:
            reply(run_round(side, request["num_iterations"]))
        elif "solve" in request:
            reply(solve(side, **request["solve"]))
        else:
            reply({"episode_length": side.evaluate()})


if __name__ == "__main__":
    main()
