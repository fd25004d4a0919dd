"""A script that benchmarks a training with JAX in which process 1 sleeps in each env step.

``slow_jax_process.py SECONDS [WORDS OF LOCKSTEP BENCHMARK]``
"""

import os
import sys
import time
from typing import Any

import jax

from lockstep.cli.main import main
from lockstep.envs.jax_env import JaxEnv


def sleep_in_steps(seconds: float) -> None:
    """Let every env step of this process take so much longer."""
    own: Any = JaxEnv.step

    def step(self: JaxEnv, state: Any, action: Any, noise: Any) -> Any:
        jax.debug.callback(lambda: time.sleep(seconds))
        return own(self, state, action, noise)

    JaxEnv.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        sleep_in_steps(float(sys.argv[1]))
    sys.exit(main(["benchmark", *sys.argv[2:]]))
