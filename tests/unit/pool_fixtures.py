"""A small task whose model is varied, whose envs are pushed, and which watches more than its reward."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.types import ActionSpace, Array, InitialState, Namespace, Observations, State, Task

# A puck that a motor pulls over a floor with little friction of its own, and that can't tilt.
MODEL = """
<mujoco>
  <option timestep="0.005"/>
  <worldbody>
    <geom type="plane" size="5 5 1" friction="0.01"/>
    <body name="puck" pos="0 0 0.1">
      <joint name="along" type="slide" axis="1 0 0"/>
      <joint name="up" type="slide" axis="0 0 1"/>
      <geom name="puck" type="sphere" size="0.1" mass="1"/>
    </body>
  </worldbody>
  <actuator><motor joint="along"/></actuator>
  <sensor><framepos objtype="body" objname="puck"/></sensor>
</mujoco>
"""


class Puck(Task):
    """A puck of which mass, friction and motor differ from variant to variant; it fails half a metre from the middle.

    One step in four pushes it along the floor. The critic also sees the step's noise, which says so.
    """

    action_space = ActionSpace("continuous", 1)
    num_observations: Mapping[str, int] = {"actor": 4, "critic": 6}
    reward_terms: tuple[str, ...] = ("progress", "alive")
    metric_terms: tuple[str, ...] = ("speed", "is_fast")
    num_reset_noise = 1
    num_step_noise = 2
    num_models = 5
    num_model_noise = 3
    max_step_reward = 10.0
    step_duration_s = 0.01

    def __init__(self, folder: Path) -> None:
        self.model_path: Path | None = folder / "puck.xml"
        self.model_path.write_text(MODEL)

    def vary_model(self, model: Any, noise: Array) -> None:
        model.body("puck").mass[:] *= 0.5 + noise[0]
        model.geom("puck").friction[0] = noise[1]
        model.actuator_gainprm[:, 0] *= 1 + 9 * noise[2]

    def reset(self, xp: Namespace, noise: Array) -> InitialState:
        along = noise - 0.5
        nothing = xp.zeros_like(along)
        return InitialState(xp.concat((along, nothing), axis=1), xp.concat((nothing, nothing), axis=1), {})

    def control(self, xp: Namespace, state: State, action: Array) -> Array:
        return action

    def push(self, xp: Namespace, state: State, noise: Array) -> Array:
        kick = xp.where(noise[:, :1] < 0.25, 2 * noise[:, 1:] - 1, xp.zeros_like(noise[:, :1]))
        return xp.concat((kick, xp.zeros_like(kick)), axis=1)

    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        return state

    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        actor = xp.concat((state.qpos, state.qvel), axis=1)
        return {"actor": actor, "critic": xp.concat((actor, noise), axis=1)}

    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        return {"progress": state.qvel[:, 0], "alive": xp.ones_like(state.qvel[:, 0])}

    def metrics(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        speed = xp.abs(state.qvel[:, 0])
        return {"is_fast": xp.astype(speed > 0.2, speed.dtype), "speed": speed}

    def terminations(self, xp: Namespace, state: State) -> Array:
        return xp.abs(state.qpos[:, 0]) > 0.5
