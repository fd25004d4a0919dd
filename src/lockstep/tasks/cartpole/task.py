"""What ``cartpole_balance`` and ``cartpole_swingup`` share: model, action, observations and reward."""

import math
from collections.abc import Mapping
from pathlib import Path

from lockstep.core.types import ActionSpace, Array, InitialState, Namespace, Observations, State, Task
from lockstep.tasks.cartpole.config import CartpoleConfig

TIMESTEP = 0.01  # s, as in model.xml: a task can't ask MuJoCo for it


class Cartpole(Task):
    """A cart on a rail, pushed by a motor, with a pole on a hinge; see ``model.xml``.

    ``qpos`` is (cart position in m, pole angle in rad, 0 upright), ``qvel`` its rate, ``ctrl`` in [-1, 1] a share of
    10 N. A task adds where the pole rests at the start and when an episode fails.
    """

    action_space = ActionSpace("continuous", 1)
    reward_terms: tuple[str, ...] = ("upright", "centred", "small_control", "small_velocity")
    num_reset_noise = 4
    model_path: Path | None = Path(__file__).with_name("model.xml")
    start_angle: float
    """Pole angle in rad about which episodes start."""

    def __init__(self, config: CartpoleConfig) -> None:
        self.config = config
        self.num_observations: Mapping[str, int] = {"actor": 5, "critic": 6}
        self.num_step_noise = self.num_observations["actor"] if config.observation_noise else 0
        weights = config.reward_weights
        self.max_step_reward = math.fsum(getattr(weights, term) for term in self.reward_terms)
        self.step_duration_s = TIMESTEP * config.decimation

    def reset(self, xp: Namespace, noise: Array) -> InitialState:
        """Start near the middle of the rail and almost at rest, the pole about ``start_angle``."""
        config, offset = self.config, 2 * noise - 1
        qpos = (
            offset[:, 0] * config.reset_cart_position_m,
            self.start_angle + offset[:, 1] * config.reset_pole_angle_rad,
        )
        qvel = (offset[:, 2] * config.reset_cart_velocity_m_s, offset[:, 3] * config.reset_pole_velocity_rad_s)
        return InitialState(xp.stack(qpos, axis=1), xp.stack(qvel, axis=1), {})

    def control(self, xp: Namespace, state: State, action: Array) -> Array:
        """Return the action clipped to [-1, 1], a share of the motor's 10 N."""
        return xp.clip(action, -1.0, 1.0)

    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        """Nothing to keep: the task has no variables of its own."""
        return state

    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        """Return ``actor``: cart position, sine and cosine of the angle, velocities, with noise if configured.

        ``critic`` is the same without noise, and the last control.
        """
        position, angle = state.qpos[:, :1], state.qpos[:, 1:]
        exact = xp.concat((position, xp.sin(angle), xp.cos(angle), state.qvel), axis=1)
        actor = exact + (2 * noise - 1) * self.config.observation_noise if self.num_step_noise else exact
        return {"actor": actor, "critic": xp.concat((exact, state.ctrl), axis=1)}

    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        """Return smooth terms in [0, weight], each in proportion to how upright the pole is: 0 hanging, 1 upright."""
        config, weights = self.config, self.config.reward_weights
        uprightness = 0.5 * (1 + xp.cos(state.qpos[:, 1]))
        centredness = xp.exp(-((state.qpos[:, 0] / config.centred_scale_m) ** 2))
        stillness = xp.exp(-((state.qvel[:, 1] / config.small_velocity_scale_rad_s) ** 2))
        return {
            "upright": weights.upright * uprightness,
            "centred": weights.centred * uprightness * centredness,
            "small_control": weights.small_control * uprightness * (1 - state.ctrl[:, 0] ** 2),
            "small_velocity": weights.small_velocity * uprightness * stillness,
        }
