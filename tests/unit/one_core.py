"""Steps many envs of MuJoCo in JAX on one core; a process of its own, since what it tests for is that it would hang."""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from lockstep.envs.jax_env import JaxEnv  # noqa: E402
from lockstep.sim import jax_host, mujoco_c  # noqa: E402
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig  # noqa: E402
from lockstep.tasks.cartpole_balance.task import CartpoleBalance  # noqa: E402
from tests.unit.jax_env_fixtures import play  # noqa: E402

NUM_ENVS, NUM_STEPS = 4096, 20  # of each device: 700 KB of state


def main() -> None:
    config = CartpoleBalanceConfig(max_episode_steps=10)
    task = CartpoleBalance(config)
    engine = jax_host.make_pure_engine(
        task, decimation=1, num_threads=1, seed=1, dtype=jnp.float64, host_engine=mujoco_c.make_engine
    )
    env = JaxEnv(task, engine, config, seed=1, dtype=jnp.float64)
    num_devices = jax.device_count()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))

    def run(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, transitions = play(env, env.reset(ids), jnp.zeros((NUM_STEPS, len(ids), 1), dtype=jnp.float64))
        return state.episode_length, transitions.done.sum(0)

    split = jax.P("ranks")
    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split))
    length, num_ended = program(jnp.arange(NUM_ENVS * num_devices, dtype=jnp.int32))
    # Every env reaches the time limit twice: the first episode may be short.
    print(num_devices, int(num_ended.min()), int(length.max()))


if __name__ == "__main__":
    with jax.enable_x64(True):
        main()
