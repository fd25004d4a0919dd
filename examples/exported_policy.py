"""Drive the quadruped in plain MuJoCo by an exported policy: ``drive`` needs two files, and nothing of lockstep.

    python examples/exported_policy.py logs/quadruped_velocity_flat/<run>/export

Without a folder it exports a policy that has hardly been trained, and stumbles.
"""

import json
import sys
from pathlib import Path

import mujoco
import numpy as np
import onnxruntime

MODEL = Path(__file__).parents[1] / "src" / "lockstep" / "tasks" / "quadruped" / "model.xml"
REST = np.tile([0.0, 0.9, -1.8], 4)  # rad, joint angles of standing; the task's README tells what else is here
DOWN = np.array([0.0, 0.0, -1.0])


def drive(folder: Path, model: mujoco.MjModel, data: mujoco.MjData, command: np.ndarray, num_steps: int) -> float:
    """Walk from the state of ``data`` on as the command says, and return the mean velocity error in m/s.

    Args:
        folder: of ``policy.onnx`` and ``policy.json``.
        model, data: of MuJoCo.
        command: velocity forwards and to the left in m/s, yaw rate in rad/s.
        num_steps: of the policy.
    """
    session = onnxruntime.InferenceSession(str(folder / "policy.onnx"), providers=["CPUExecutionProvider"])
    settings = json.loads((folder / "policy.json").read_text())["env"]
    action, error = np.zeros(12), 0.0
    for _ in range(num_steps):
        to_trunk, down, velocity = np.zeros(4), np.zeros(3), np.zeros(3)
        mujoco.mju_negQuat(to_trunk, data.qpos[3:7])
        mujoco.mju_rotVecQuat(down, DOWN, to_trunk)
        seen = np.concatenate((data.qvel[3:6], down, data.qpos[7:] - REST, data.qvel[6:], command, action))
        (actions,) = session.run(None, {"observations": seen[None].astype(np.float32)})
        action = np.clip(actions[0], -20.0, 20.0)
        data.ctrl[:] = REST + settings["action_scale_rad"] * action
        mujoco.mj_step(model, data, nstep=settings["decimation"])
        mujoco.mju_negQuat(to_trunk, data.qpos[3:7])
        mujoco.mju_rotVecQuat(velocity, data.qvel[:3], to_trunk)
        error += float(np.linalg.norm(command[:2] - velocity[:2]))
    return error / num_steps


def main() -> None:
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    else:
        import lockstep

        settings = {"num_envs": 32, "max_iterations": 2, "evaluation": {"interval": 0}, "log_root": "logs/examples"}
        config = lockstep.make_config("quadruped_velocity_flat", **settings)
        folder = lockstep.export(lockstep.train(config).run_path).folder
    model = mujoco.MjModel.from_xml_path(str(MODEL))
    data = mujoco.MjData(model)
    data.qpos[:7], data.qpos[7:] = (0, 0, 0.3, 1, 0, 0, 0), REST
    error = drive(folder, model, data, np.array([0.6, 0.0, 0.0]), num_steps=250)
    print(f"5 s at 0.6 m/s: {data.qpos[0]:.2f} m forwards, velocity error {error:.2f} m/s")


if __name__ == "__main__":
    main()
