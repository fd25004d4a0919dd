"""What an iteration of a config consists of, counted from its settings."""

from collections.abc import Sequence
from itertools import pairwise

from lockstep.benchmark.schema import Work
from lockstep.core.types import Task
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.recipes.libraries import OWN

_GATES = {"none": 0, "gru": 3, "lstm": 4}


def work_of(config: TrainConfig, task: Task) -> Work | None:
    """Return the work of an iteration; None where the learner is not ours, or of an algorithm without such counts."""
    agent = config.agent
    if config.runner or config.rl_library != OWN or not isinstance(agent, PpoConfig):
        return None
    space = task.action_space
    actor = _layers(agent, task.num_observations["actor"], agent.actor_hidden_dims, space.size)
    critic = _layers(agent, task.num_observations["critic"], agent.critic_hidden_dims, 1)
    spread = space.size if space.kind == "continuous" else 0
    return Work(
        num_steps_per_env=agent.num_steps_per_env,
        num_learning_epochs=agent.num_learning_epochs,
        num_mini_batches=agent.num_mini_batches,
        num_parameters=sum(inputs * outputs + biases for inputs, outputs, biases in (*actor, *critic)) + spread,
        flops_per_action=_flops(actor),
        flops_per_sample=_flops(actor) + _flops(critic),
    )


def _layers(
    agent: PpoConfig, num_observations: int, hidden: Sequence[int], num_outputs: int
) -> list[tuple[int, int, int]]:
    """Return inputs, outputs and number of biases of every matrix of a network."""
    found = []
    if agent.recurrent != "none":
        width = _GATES[agent.recurrent] * agent.recurrent_hidden_dim
        # torch's cells have a bias for the inputs and one for the memory.
        found += [(num_observations, width, width), (agent.recurrent_hidden_dim, width, width)]
        num_observations = agent.recurrent_hidden_dim
    return found + [
        (inputs, outputs, outputs) for inputs, outputs in pairwise((num_observations, *hidden, num_outputs))
    ]


def _flops(layers: Sequence[tuple[int, int, int]]) -> float:
    """Return the floating-point operations of the products of one sample, forward: a product is two of them."""
    return float(sum(2 * inputs * outputs for inputs, outputs, _ in layers))
