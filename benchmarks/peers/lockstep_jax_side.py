"""lockstep's side with JAX: the training that ``lockstep train --ml_framework jax`` runs, without its run directory."""

from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import jax
from jax_work import matrix_gflops
from lockstep_side import make_config
from workload import NUM_EVALUATION_EPISODES, Workload

from lockstep.session.jax_session import JAX


class LockstepJaxSide:
    def __init__(self, workload: Workload) -> None:
        evaluation = {"num_episodes": NUM_EVALUATION_EPISODES}
        config = make_config(workload, ml_framework="jax", evaluation=evaluation)
        jax.config.update("jax_enable_x64", True)  # for counts, as JAX.running() does
        self.training = JAX.make_learner(config, JAX.join(config), ExitStack()).runner
        self.versions = {"lockstep": version("lockstep-rl"), "jax": jax.__version__}

    def first_iteration(self) -> dict[str, Any]:
        gflops = matrix_gflops(self.training._traced.jaxpr.jaxpr)
        self.training.iterate()
        parameters = jax.tree.leaves(self.training.algorithm.weights(self.training.state.replicated).parameters)
        return {
            "matrix_gflops": gflops,
            "optimizer_steps": self.num_optimizer_steps(),
            "env_steps": self.num_env_steps(),
            "parameters": sum(leaf.size for leaf in parameters),
        }

    def iterate(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            self.training.iterate()

    def num_optimizer_steps(self) -> int:
        return int(self.training.state.replicated.optimizer.count)

    def num_env_steps(self) -> int:
        return self.training.env_steps

    def evaluate(self) -> float:
        return float(self.training.evaluate()["eval/mean_episode_length"])
