"""Stepping envs with random actions, with JAX: a block of steps is one compiled program on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core import beats
from lockstep.core.errors import UsageError
from lockstep.distributed.jax_mesh import REPLICATED, SHARDED
from lockstep.learn.jax.training import pad_ids
from lockstep.session.random_actions import RandomActions

if TYPE_CHECKING:
    from contextlib import ExitStack

    from lockstep.distributed.jax_mesh import RankMesh
    from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv
    from lockstep.learn.config import TrainConfig

    Carry = tuple[EnvState, jax.Array]  # with () int32, the env steps so far

_CARRY = (SHARDED, REPLICATED)


class JaxStepper:
    """The ``Stepper`` of JAX; each device is a rank, and one with fewer envs than another steps padding beside them.

    Ranks exchange nothing, so each device is done when its own work is; of those of one process none begins the next
    block before all have done this one.

    Args:
        config: of the run.
        env: makes and steps envs.
        ranks: the mesh.
        resources: threads end with them.

    Raises:
        UsageError: ``enable_jit`` is off.
    """

    def __init__(self, config: TrainConfig, env: JaxEnv, ranks: RankMesh, resources: ExitStack) -> None:
        if not config.enable_jit:
            raise UsageError("enable_jit false is there to look into a program, and its times say nothing; leave it on")
        self.env, self._ranks = env, ranks
        shares = config.envs_by_rank(ranks.num_ranks)
        self.num_envs = {rank: shares[rank] for rank in ranks.local_ranks}
        self.compile_s: float | None = 0.0
        self._actions = RandomActions(env.task.action_space, config.seed, jnp, env.dtype, jnp.int32)
        self._programs: dict[int, Callable[[Carry], Carry]] = {}
        self._waiting = resources.enter_context(ThreadPoolExecutor(len(ranks.local_ranks)))
        reset = ranks.compile(env.reset, (SHARDED,), SHARDED)
        self._carry: Carry = reset(ranks.shard(pad_ids(shares))), ranks.replicate(np.int32(0))

    def step(self, num_steps: int) -> dict[int, float]:
        """Run the program of so many steps; the first time it is compiled, which is no part of the seconds."""
        beats.enter("step")
        program = self._program(num_steps)
        began = time.perf_counter()
        self._carry = program(self._carry)
        with beats.exchange(beats.DEVICE):
            # One thread for each device, since they may be done in any order.
            done = list(self._waiting.map(self._wait_for, range(len(self.num_envs))))
        return {rank: end - began for rank, end in zip(self._ranks.local_ranks, done, strict=True)}

    def states(self) -> dict[str, np.ndarray]:
        """Copy what the task sees to the host, without padding."""
        whole = self._carry[0]
        found = {"env_ids": whole.env_ids, "qpos": whole.state.qpos, "qvel": whole.state.qvel}
        found |= {"sensordata": whole.state.sensordata}
        found |= {f"observations/{name}": array for name, array in whole.observations.items()}
        devices = range(len(self.num_envs))
        local = {
            name: np.concatenate([np.asarray(array.addressable_data(index)) for index in devices])
            for name, array in found.items()
        }
        is_real = local["env_ids"] >= 0
        return {name: rows[is_real] for name, rows in local.items()}

    def _program(self, num_steps: int) -> Callable[[Carry], Carry]:
        if num_steps not in self._programs:
            jax.block_until_ready(self._carry)  # what comes before is not the compiler's time
            began = time.perf_counter()
            traceable: Any = self._ranks.compile(partial(self._traced_steps, num_steps), (_CARRY,), _CARRY, donate=0)
            self._programs[num_steps] = traceable.trace(self._carry).lower().compile()
            self.compile_s = cast(float, self.compile_s) + time.perf_counter() - began
        return self._programs[num_steps]

    def _traced_steps(self, num_steps: int, carry: Carry) -> Carry:
        def one_step(state: EnvState, drawn: tuple[EnvNoise, jax.Array]) -> tuple[EnvState, None]:
            noise, action = drawn
            # Observations, reward terms and ends live on in the state, so that the compiler can't leave them out.
            return self.env.step(state, action, noise)[0], None

        state, num_steps_before = carry
        actions = self._actions.draw(num_steps_before, num_steps, state.env_ids)
        noise = self.env.noise(state.env_ids, num_steps_before + 1, num_steps)
        state, _ = jax.lax.scan(one_step, state, (noise, actions))
        return state, num_steps_before + num_steps

    def _wait_for(self, index: int) -> float:
        """Return when the device of this number among this process's has done its work."""
        jax.block_until_ready([leaf.addressable_data(index) for leaf in jax.tree.leaves(self._carry)])
        return time.perf_counter()
