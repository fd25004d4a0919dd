"""One side in its own process: prepares itself, then runs a round of iterations whenever a line asks for one.

Talks JSON lines over stdin and the descriptor that was stdout; whatever a library prints goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

import torch
from workload import Side, Workload

from lockstep.session.process import keep_large_buffers


def make_side(library: str, workload: Workload, env: str) -> Side:
    # Each library is imported where it is asked for: neither environment has both.
    if library == "lockstep":
        from lockstep_side import LockstepSide

        return LockstepSide(workload, env)
    from rsl_rl_side import RslRlSide

    return RslRlSide(workload, env)


@contextmanager
def counting_trained_rows(side: Side) -> Iterator[dict[str, int]]:
    """Count the samples that pass each network with gradients on, as its first layer sees them."""
    rows: dict[str, int] = {}
    with ExitStack() as hooks:
        for name, layer in side.first_layers().items():
            rows[name] = 0

            def count(_: object, inputs: tuple[torch.Tensor], __: object, name: str = name) -> None:
                if torch.is_grad_enabled():
                    rows[name] += inputs[0].numel() // inputs[0].shape[-1]

            hooks.callback(layer.register_forward_hook(count).remove)
        yield rows


def prepare(request: dict[str, Any]) -> tuple[Side, dict[str, Any]]:
    """Build the side and run its first iterations; return it with what one iteration of it does."""
    os.sched_setaffinity(0, {request["core"]})
    torch.set_num_threads(1)
    kept = keep_large_buffers() if request["keep_large_buffers"] else False
    workload = Workload(**{**request["workload"], "hidden_dims": tuple(request["workload"]["hidden_dims"])})
    side = make_side(request["library"], workload, request["env"])
    with counting_trained_rows(side) as rows:
        side.iterate(1)
    work = {
        "trained_rows": rows,
        "optimizer_steps": side.num_optimizer_steps(),
        "env_steps": side.num_env_steps(),
        "parameters": side.num_parameters(),
    }
    first_length = side.mean_episode_length()
    side.iterate(request["warm_up"])
    return side, {
        "work": work,
        "first_mean_episode_length": first_length,
        "keep_large_buffers": kept,
        "versions": side.versions | {"python": sys.version.split()[0]},
    }


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
        "mean_episode_length": side.mean_episode_length(),
    }


def main() -> None:
    replies: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    side, description = prepare(json.loads(sys.stdin.readline()))
    reply(description)
    for line in sys.stdin:
        reply(run_round(side, json.loads(line)["num_iterations"]))


if __name__ == "__main__":
    main()
