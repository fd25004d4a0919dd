"""Drive the quadruped in plain MuJoCo by an exported policy: two files and its model, and nothing of lockstep.

    python examples/exported_policy.py [logs/quadruped_velocity_flat/<run>/export]

Without a folder it takes the policy beside it, which half an hour on two CPU cores has trained.
"""

import json
import sys
from pathlib import Path

import mujoco
import numpy as np
import onnxruntime

HERE = Path(__file__).parent
MODEL = HERE.parent / "src" / "lockstep" / "tasks" / "quadruped" / "model.xml"
REST = np.tile([0.0, 0.9, -1.8], 4)  # rad, joint angles of standing; the task's README tells what else is here


def to_trunk(data: mujoco.MjData, vector: np.ndarray) -> np.ndarray:
    """Return a vector of the world in the trunk's own axes."""
    turned, inverse = np.zeros(3), np.zeros(4)
    mujoco.mju_negQuat(inverse, data.qpos[3:7])
    mujoco.mju_rotVecQuat(turned, vector, inverse)
    return turned


def drive(folder: Path, model: mujoco.MjModel, data: mujoco.MjData, command: np.ndarray, num_steps: int) -> float:
    """Walk on from ``data`` as commanded (m/s, m/s, rad/s); return what following the command has earned."""
    session = onnxruntime.InferenceSession(folder / "policy.onnx", providers=["CPUExecutionProvider"])
    env = json.loads((folder / "policy.json").read_text())["env"]
    weights, step_s = env["reward_weights"], env["decimation"] * model.opt.timestep
    action, earned = np.zeros(12), 0.0
    for _ in range(num_steps):
        down = to_trunk(data, np.array([0.0, 0.0, -1.0]))
        seen = np.concatenate((data.qvel[3:6], down, data.qpos[7:] - REST, data.qvel[6:], command, action))
        action = session.run(None, {"observations": seen[None].astype(np.float32)})[0][0]
        data.ctrl[:] = REST + env["action_scale_rad"] * action
        mujoco.mj_step(model, data, nstep=env["decimation"])
        off = np.linalg.norm(command[:2] - to_trunk(data, data.qvel[:3])[:2]) / env["velocity_scale_m_s"]
        yaw_off = (command[2] - data.qvel[5]) / env["yaw_rate_scale_rad_s"]
        earned += weights["track_velocity"] * np.exp(-(off**2)) + weights["track_yaw_rate"] * np.exp(-(yaw_off**2))
    return float(earned * step_s)


if __name__ == "__main__":
    model = mujoco.MjModel.from_xml_path(str(MODEL))
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "quadruped"
    earned = drive(folder, model, data, command=np.array([0.6, 0.0, 0.0]), num_steps=250)
    print(f"5 s at 0.6 m/s: {data.qpos[0]:.2f} m forwards; following the command earned {earned:.1f} of 20")
