"""Distillation by RSL-RL: the student imitates, and the teacher comes from a run, or from the checkpoint itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.core.errors import UsageError
from tests.unit.learner_fixtures import round_trip

pytest.importorskip("rsl_rl", reason="needs RSL-RL: pip install 'lockstep-rl[rsl-rl]'")

from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch import checkpoint
from lockstep.learn.torch.guest import GuestTraining
from lockstep.session.make_env import build_share
from lockstep.session.runner import make_runner
from tests.unit.rsl_rl_fixtures import MEMORY, config_with, equal_states, training_of

TEACHER = "teacher.pt"


def trained_teacher(**settings: Any) -> GuestTraining:
    """Train a teacher for a moment and write its checkpoint."""
    teacher = training_of(config_with(**settings))
    for _ in range(3):
        teacher.iterate()
    checkpoint.save(teacher.state_dict(), Path(TEACHER))
    return teacher


def student_config(agent: dict[str, Any] | None = None, **settings: Any) -> TrainConfig:
    return config_with({"teacher": TEACHER} | (agent or {}), algorithm="distillation", **settings)


@pytest.mark.parametrize("memory", [{}, MEMORY])
def test_a_student_comes_to_do_what_its_teacher_does(memory: dict[str, Any]) -> None:
    teacher = trained_teacher(library={"obs_groups": {"actor": ["actor", "critic"]}})
    agent = {"actor_hidden_dims": (32,), "learning_rate": 3e-3, "num_learning_epochs": 4, "num_steps_per_env": 12}
    student = training_of(student_config(agent | memory, num_envs=16))
    observations = {"actor": teacher.env.observations["actor"], "critic": teacher.env.observations["critic"]}
    with torch.no_grad():
        expected, _ = teacher.policy.most_likely(observations, torch.zeros(0))

    @torch.no_grad()
    def difference() -> float:
        actions, _ = student.policy.most_likely(observations, student.policy.initial_memory(8))
        return float((actions - expected).square().mean().sqrt())

    losses = [student.iterate()["loss/behavior"] or 0.0 for _ in range(20)]
    assert losses[-1] < 0.1 * losses[0]
    assert difference() < 0.2 * float(expected.square().mean().sqrt())
    assert student.policy.groups == ["actor"]  # type: ignore[attr-defined]
    assert student.policy.parts().head == "mean"


def test_the_teacher_is_in_the_checkpoint_and_its_file_is_needed_no_more() -> None:
    teacher = trained_teacher(agent=MEMORY)
    through = training_of(student_config(MEMORY))
    for _ in range(2):
        through.iterate()
    state = round_trip(through.state_dict())
    before = teacher.learner.algorithm.get_policy().state_dict()  # type: ignore[attr-defined]
    assert all(tensor.equal(before[name]) for name, tensor in state["state"]["algorithm"]["teacher_state_dict"].items())
    Path(TEACHER).unlink()
    resumed = training_of(student_config(MEMORY))
    with pytest.raises(UsageError, match=r"agent\.teacher: checkpoint teacher\.pt does not exist"):
        resumed.require_ready()
    resumed.load_state_dict(state, "model_2.pt")
    resumed.require_ready()
    assert equal_states(through, resumed)
    for training in (through, resumed):
        training.iterate()
    assert equal_states(through, resumed)
    begun = training_of(student_config(MEMORY))
    begun.load_weights(state, "model_2.pt")
    begun.iterate()


def test_a_teacher_with_a_memory_keeps_it_from_rollout_to_rollout() -> None:
    trained_teacher(agent=MEMORY)
    training = training_of(student_config(env={"max_episode_steps": 10_000}))
    training.iterate()
    hidden = training.learner.algorithm.teacher.get_hidden_state()  # type: ignore[attr-defined]
    assert hidden is not None and hidden.abs().max() > 0


@pytest.mark.parametrize(
    ("told", "teacher", "student"),
    [
        ("needs a teacher; name a run", {}, {"agent": {"teacher": ""}}),
        (r"agent\.teacher: .*cartpole_classic", {}, {"task": "cartpole_balance"}),
        ("rl_library rsl_rl, algorithm distillation; a teacher is", {"algorithm": "distillation"}, {}),
    ],
)
def test_what_is_no_teacher_is_refused(told: str, teacher: dict[str, Any], student: dict[str, Any]) -> None:
    trained_teacher()
    content = checkpoint.load(Path(TEACHER))
    content["config"] |= teacher
    checkpoint.save(content, Path(TEACHER))
    config = student_config(**{name: value for name, value in student.items() if name != "task"})
    config = config.model_copy(update={name: value for name, value in student.items() if name == "task"})
    env = build_share(student_config(), (8,), 0)
    training = make_runner(config, env, SoloComm())
    with pytest.raises(UsageError, match=told):
        training.require_ready()
