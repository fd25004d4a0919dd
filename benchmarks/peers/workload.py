"""What all sides are asked to do, and what a side must offer. Standard library only: every environment reads it."""

from dataclasses import dataclass
from typing import Any, Protocol

NUM_EVALUATION_EPISODES = 128


@dataclass(frozen=True)
class Workload:
    """One PPO training of ``cartpole_classic`` with continuous actions; ``contenders.py`` says who differs in what."""

    num_envs: int = 4096
    num_steps_per_env: int = 24
    num_learning_epochs: int = 5
    num_mini_batches: int = 4
    hidden_dims: tuple[int, ...] = (64, 64)  # of the actor and of the critic, ELU
    normalize_observations: bool = True
    learning_rate: float = 1e-3
    desired_kl: float = 0.01  # of the adaptive schedule
    seed: int = 1

    @property
    def samples_per_iteration(self) -> int:
        return self.num_envs * self.num_steps_per_env

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps."""
        return self.num_learning_epochs * self.num_mini_batches


class Side(Protocol):
    """One library, ready to train."""

    versions: dict[str, str]

    def first_iteration(self) -> dict[str, Any]:
        """Run one iteration and return what it did.

        ``optimizer_steps``, ``env_steps`` and ``parameters`` (how many numbers are trained) are integers;
        ``matrix_gflops`` counts the products of matrices, as they were done or as they stand in the program.
        """

    def iterate(self, num_iterations: int) -> None:
        """Run whole training iterations: rollout and update."""

    def num_optimizer_steps(self) -> int:
        """Return how many steps the optimizer has taken so far."""

    def num_env_steps(self) -> int:
        """Return how many env steps (all envs added) were taken so far."""

    def evaluate(self) -> float:
        """Return the mean length of ``NUM_EVALUATION_EPISODES`` whole episodes with the most likely actions."""
