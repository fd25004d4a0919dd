"""Cart-pole of Barto, Sutton and Anderson (1983): the toy on which learning itself is a unit test."""

import math
from collections.abc import Mapping
from pathlib import Path

from lockstep.core.types import ActionSpace, Array, InitialState, Namespace, Observations, State, Task
from lockstep.tasks.cartpole_classic.config import CartpoleClassicConfig

GRAVITY = 9.8  # m/s^2
CART_MASS = 1.0  # kg
POLE_MASS = 0.1  # kg
POLE_HALF_LENGTH = 0.5  # m
TIMESTEP = 0.02  # s


class CartpoleClassic(Task):
    """Keep a pole upright by pushing the cart it stands on.

    Equations: A. G. Barto, R. S. Sutton and C. W. Anderson, "Neuronlike adaptive elements that can solve difficult
    learning control problems", IEEE Transactions on Systems, Man, and Cybernetics 13 (1983), 834-846; without their
    small friction, as in the program they published with it.

    ``qpos`` is (cart position in m, pole angle in rad, 0 upright, positive to the right), ``qvel`` its rate, ``ctrl``
    the force on the cart in N, positive to the right.
    """

    reward_terms: tuple[str, ...] = ("alive",)
    max_step_reward = 1.0
    num_reset_noise = 4
    num_step_noise = 0
    num_positions = 2
    num_velocities = 2
    num_controls = 1
    model_path: Path | None = None

    def __init__(self, config: CartpoleClassicConfig) -> None:
        self.config = config
        discrete = config.action_kind == "discrete"
        self.action_space = ActionSpace("discrete", 2) if discrete else ActionSpace("continuous", 1)
        self.num_observations: Mapping[str, int] = {"actor": 4, "critic": 4}
        self.step_duration_s = TIMESTEP * config.decimation

    def reset(self, xp: Namespace, noise: Array) -> InitialState:
        """Start close to upright and at rest."""
        offset = (2 * noise - 1) * self.config.reset_range
        return InitialState(offset[:, :2], offset[:, 2:], {})

    def control(self, xp: Namespace, state: State, action: Array) -> Array:
        """Return the force on the cart in N; continuous actions are clipped to [-1, 1]."""
        if self.action_space.kind == "continuous":
            return xp.clip(action, -1.0, 1.0) * self.config.max_force_newtons
        right = xp.full_like(state.qpos[:, :1], self.config.max_force_newtons)
        return xp.where((action == 1)[:, None], right, -right)

    def dynamics(self, xp: Namespace, qpos: Array, qvel: Array, ctrl: Array) -> tuple[Array, Array]:
        """Return the state ``TIMESTEP`` later by an explicit Euler step, as in the original."""
        sine, cosine = xp.sin(qpos[:, 1]), xp.cos(qpos[:, 1])
        total_mass = CART_MASS + POLE_MASS
        pole_moment = POLE_MASS * POLE_HALF_LENGTH
        push = (ctrl[:, 0] + pole_moment * qvel[:, 1] ** 2 * sine) / total_mass
        angular_acceleration = (GRAVITY * sine - cosine * push) / (
            POLE_HALF_LENGTH * (4 / 3 - POLE_MASS * cosine**2 / total_mass)
        )
        acceleration = push - pole_moment * angular_acceleration * cosine / total_mass
        accelerations = xp.stack((acceleration, angular_acceleration), axis=1)
        return qpos + TIMESTEP * qvel, qvel + TIMESTEP * accelerations

    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        """Nothing to keep: the task has no variables of its own."""
        return state

    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        """Return (cart position, pole angle, cart velocity, pole angular velocity), the same for both groups."""
        observation = xp.concat((state.qpos, state.qvel), axis=1)
        return {"actor": observation, "critic": observation}

    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        """Return 1 per step, the failing one included."""
        return {"alive": xp.ones_like(state.qpos[:, 0])}

    def terminations(self, xp: Namespace, state: State) -> Array:
        """The pole leans too far or the cart has left its track."""
        off_track = xp.abs(state.qpos[:, 0]) > self.config.max_cart_position_m
        fallen = xp.abs(state.qpos[:, 1]) > math.radians(self.config.max_pole_angle_deg)
        return off_track | fallen
