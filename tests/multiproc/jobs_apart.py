"""One of two processes of JAX that steps envs, then trains with the other and alone by turns; prints what it found.

Run as ``python -m tests.multiproc.jobs_apart ADDRESS PROCESS SETTINGS``, settings in JSON. What is printed is JSON, in
the last line. While they train alone process 1 goes no further than its first env step before process 0 has done all of
its iterations, and then sleeps in each: it ends only if neither waits for the other in anything that it exchanges.
"""

import dataclasses
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

STEP_S = 0.02
"""For which process 1 sleeps in each env step."""
NUM_ITERATIONS = 2
TIMEOUT_S = 120.0


def numbers_of(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return what there is and does not depend on the clock."""
    names = [name for name in metrics if not name.startswith("time/") and name != "steps_per_s"]
    return {name: metrics[name] for name in names if metrics[name] is not None}


class Signalling:
    """All processes, as they see one another; says in a file when this one has done what it measures."""

    def __init__(self, comm: Any, process: int) -> None:
        self._comm, self._process = comm, process
        self._num_calls = 0
        self.is_armed = False

    def gather_text(self, text: str, tag: str) -> list[str]:
        self._num_calls += 1
        is_end = self._num_calls % 2 == 0
        if is_end:
            Path(f"done {self._process} {self._num_calls // 2}").touch()
        texts: list[str] = self._comm.gather_text(text, tag)
        self.is_armed = not is_end
        return texts

    @property
    def block(self) -> int:
        """Which block of iterations this is, from 1 on."""
        return (self._num_calls + 1) // 2


def hold(comm: Signalling, held: list[bool]) -> None:
    """Wait for process 0 to have done all of its iterations, then sleep."""
    if not comm.is_armed:
        return
    deadline, done = time.monotonic() + TIMEOUT_S, Path(f"done 0 {comm.block}")
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    held.append(done.exists())
    time.sleep(STEP_S)


def hold_in_steps(comm: Signalling, held: list[bool]) -> None:
    """Let every env step from now on call ``hold``."""
    import jax

    from lockstep.envs.jax_env import JaxEnv

    own: Any = JaxEnv.step

    def step(self: JaxEnv, state: Any, action: Any, noise: Any) -> Any:
        jax.debug.callback(lambda: hold(comm, held))
        return own(self, state, action, noise)

    JaxEnv.step = step  # type: ignore[method-assign]


def main() -> None:
    address, process, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    os.environ |= {"RANK": str(process), "LOCAL_RANK": str(process), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ["JAX_COORDINATOR_ADDRESS"] = address
    import lockstep
    from lockstep.benchmark.runtime.steps import time_steps
    from lockstep.benchmark.training.apart import measure_apart
    from lockstep.session.jax_session import JAX

    config = lockstep.make_config(**settings)
    with ExitStack() as resources:
        resources.enter_context(JAX.running())
        team = JAX.join(config)
        own = JAX.make_stepper(config, team, resources)
        measured = time_steps(own, team.comm, config.agent.num_steps_per_env, 1, 4)
        stepper = JAX.make_stepper(config, team, resources)
        stepper.step(5 * config.agent.num_steps_per_env)
        states = stepper.states()

        together: Any = JAX.make_learner(config, team, resources).runner
        comm, held = Signalling(team.comm, process), list[bool]()
        if process == 1:
            hold_in_steps(comm, held)
        apart: Any = JAX.make_apart(config, team, resources)
        curve, apart_s = [], []
        for _ in range(2):
            curve += [together.iterate() for _ in range(2)]
            apart_s.append(measure_apart(apart, comm, NUM_ITERATIONS))  # type: ignore[arg-type]
        curve.append(together.iterate())
        found = {
            "runtime": dataclasses.asdict(measured),
            "env_ids": states["env_ids"].tolist(),
            "qpos": states["qpos"].tolist(),
            "curve": [numbers_of(record) for record in curve],
            "apart_s": apart_s,
            "held": held,
            "alone": [apart.runner.ranks.num_ranks, apart.runner.total_envs, apart.runner.iteration],
        }
        team.comm.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
