"""An exported policy walks in plain MuJoCo as it does in lockstep's own env."""

import importlib.util
from itertools import islice
from pathlib import Path
from types import ModuleType

import array_api_compat.numpy as xp
import mujoco
import numpy as np
import pytest

import lockstep
from lockstep.core.types import State
from lockstep.session.framework import Frame, framework_of
from lockstep.tasks.quadruped_velocity_flat.config import QuadrupedVelocityFlatConfig
from lockstep.tasks.quadruped_velocity_flat.task import QuadrupedVelocityFlat
from tests.unit.export_fixtures import torch_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "exported_policy.py"
NUM_STEPS = 40
COMMAND = (0.5, -0.2, 0.3)
NOTHING_BY_CHANCE = {
    "randomization": {"num_models": 1},
    "observation_noise": dict.fromkeys(
        ("angular_velocity_rad_s", "gravity", "joint_position_rad", "joint_velocity_rad_s"), 0.0
    ),
    "push_velocity_m_s": 0.0,
    "standing_share": 0.0,
    **{
        name: (value, value)
        for name, value in zip(
            ("command_forward_m_s", "command_sideways_m_s", "command_yaw_rate_rad_s"), COMMAND, strict=True
        )
    },
}


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported_policy", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_robot_goes_the_same_way(tmp_path: Path) -> None:
    path = torch_checkpoint(tmp_path / "model_7.pt", spread=0.02, task="quadruped_velocity_flat", env=NOTHING_BY_CHANCE)
    folder = lockstep.export(path, tmp_path / "out", ["onnx"]).folder
    policy = lockstep.load_policy(path, "cpu")
    own = list(islice(framework_of(policy.config).frames(policy, policy.config), NUM_STEPS + 1))
    assert not any(frame.starts_episode for frame in own[1:])
    driver = example()
    model = mujoco.MjModel.from_xml_path(str(driver.MODEL))
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = own[0].qpos, own[0].qvel
    earned = driver.drive(folder, model, data, np.array(COMMAND), NUM_STEPS)
    assert np.abs(own[-1].qpos - own[0].qpos).max() > 0.05
    np.testing.assert_allclose(data.qpos, own[-1].qpos, atol=1e-5)
    assert earned == pytest.approx(following(own[1:]), rel=1e-5)


def following(frames: list[Frame]) -> float:
    """What following the command earns in lockstep's own reward."""
    task = QuadrupedVelocityFlat(QuadrupedVelocityFlatConfig.model_validate(NOTHING_BY_CHANCE))
    qpos, qvel = np.stack([frame.qpos for frame in frames]), np.stack([frame.qvel for frame in frames])
    variables = task.reset(xp, np.full((len(frames), task.num_reset_noise), 0.5)).variables
    state = State(qpos, qvel, qpos[:, 7:], qpos[:, :0], variables | {"until_command": np.ones(len(frames))})
    state = task.advance(xp, state, qpos[:, 7:], np.zeros((len(frames), task.num_step_noise)))
    assert np.allclose(state.variables["command"], COMMAND)
    terms = task.rewards(xp, state, qpos[:, 7:])
    return float(terms["track_velocity"].sum() + terms["track_yaw_rate"].sum())
