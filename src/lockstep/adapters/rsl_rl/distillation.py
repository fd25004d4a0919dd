"""Distillation of RSL-RL whose ranks stay in step."""

from typing import Any

import torch
from rsl_rl.algorithms import Distillation
from torch import nn

from lockstep.core.types import Comm
from lockstep.distributed.torch_gradients import average_gradients
from lockstep.distributed.torch_statistics import Number


class InStepDistillation(Distillation):  # type: ignore[misc]
    """RSL-RL's distillation; ``join`` comes before the first step.

    Every rank counts by its envs. A teacher with a memory keeps it from rollout to rollout, which RSL-RL has it lose.
    """

    last_hidden_states: tuple[Any, Any]

    def join(self, comm: Comm) -> None:
        """Take up the ranks, which the constructor can't be given."""
        self.comm = comm

    def models(self) -> dict[str, nn.Module]:
        """Return what is trained or counts, by name."""
        return {"student": self.student, "teacher": self.teacher}

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return them by name."""
        return {"optimizer": self.optimizer}

    def counters(self) -> dict[str, Any]:
        """Return the numbers that go on from iteration to iteration."""
        return {"num_updates": self.num_updates}

    def load_counters(self, counters: dict[str, Any]) -> None:
        """Take up what ``counters`` returned."""
        self.num_updates = counters["num_updates"]

    def update(self) -> dict[str, Number]:
        """Run the update; return RSL-RL's mean loss of this rank, and ``learning_rate``."""
        memory = self.teacher.get_hidden_state()
        losses: dict[str, Number] = super().update()  # of a rank without envs means over nothing
        self.teacher.reset(hidden_state=memory)
        self.last_hidden_states = (self.last_hidden_states[0], None)
        return losses | {"learning_rate": self.learning_rate}

    def reduce_parameters(self) -> None:
        """Average the gradients over all envs."""
        average_gradients(self.student, self.storage.num_envs, comm=self.comm)
