"""brax's side: its ``ppo.train``, held between two iterations until the next ones are asked for."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import jax
from brax.envs.base import Env, State
from brax.envs.wrappers.training import EpisodeWrapper, VmapWrapper
from brax.training.agents.ppo import networks
from brax.training.agents.ppo import train as ppo
from flax import linen
from jax import numpy as jnp
from jax_work import matrix_gflops
from workload import NUM_EVALUATION_EPISODES, Workload

from lockstep.core.registry import load
from lockstep.recipes.catalog import TASKS

MANY = 100_000  # iterations: more than anybody waits for


class CartpoleClassic(Env):
    """The equations, limits and starts of lockstep's task, in as few operations as they need.

    Equations: Barto, Sutton and Anderson (1983), as in lockstep's task.
    """

    def __init__(self) -> None:
        self.task = load(TASKS.get("cartpole_classic").recipe)().env

    @property
    def observation_size(self) -> int:
        return 4

    @property
    def action_size(self) -> int:
        return 1

    @property
    def backend(self) -> str:
        return "none"

    def reset(self, rng: jax.Array) -> State:
        reach = self.task.reset_range
        state = jax.random.uniform(rng, (4,), minval=-reach, maxval=reach)
        return State(state, state, jnp.zeros(()), jnp.zeros(()))

    def step(self, state: State, action: jax.Array) -> State:
        _, angle, velocity, angular_velocity = state.obs
        sine, cosine = jnp.sin(angle), jnp.cos(angle)
        force = jnp.clip(action[0], -1.0, 1.0) * self.task.max_force_newtons
        push = (force + 0.05 * angular_velocity**2 * sine) / 1.1
        angular_acceleration = (9.8 * sine - cosine * push) / (2.0 / 3.0 - (0.05 / 1.1) * cosine**2)
        acceleration = push - (0.05 / 1.1) * angular_acceleration * cosine
        rates = jnp.stack((velocity, angular_velocity, acceleration, angular_acceleration))
        after = state.obs + 0.02 * rates
        failed = jnp.abs(after[0]) > self.task.max_cart_position_m
        failed |= jnp.abs(after[1]) > math.radians(self.task.max_pole_angle_deg)
        return state.replace(pipeline_state=after, obs=after, reward=jnp.ones(()), done=failed.astype(jnp.float32))


class BraxSide:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.env = CartpoleClassic()
        self.versions = {"brax": version("brax"), "jax (brax)": jax.__version__}
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._env_steps = 0
        self._policy: Any = None
        self._failure: BaseException | None = None
        self._jaxpr: Any = None
        self._evaluate = jax.jit(self._lengths, static_argnums=0)
        threading.Thread(target=self._train, daemon=True).start()
        self._wait()  # until it is built

    def _train(self) -> None:
        workload = self.workload
        network_factory = functools.partial(
            networks.make_ppo_networks,
            policy_hidden_layer_sizes=workload.hidden_dims,
            value_hidden_layer_sizes=workload.hidden_dims,
            activation=linen.elu,
            # A spread that is a parameter of its own, as on the other sides; the default would be another output.
            distribution_type="normal",
            noise_std_type="log",
        )
        try:
            with _seen_by(self._see):
                ppo.train(
                    self.env,
                    num_timesteps=MANY * workload.samples_per_iteration,
                    num_evals=MANY + 1,  # an iteration between any two
                    run_evals=False,
                    episode_length=self.env.task.max_episode_steps,
                    num_envs=workload.num_envs,
                    unroll_length=workload.num_steps_per_env,
                    batch_size=workload.num_envs // workload.num_mini_batches,
                    num_minibatches=workload.num_mini_batches,
                    num_updates_per_batch=workload.num_learning_epochs,
                    normalize_observations=workload.normalize_observations,
                    learning_rate=workload.learning_rate,
                    # With the other sides' schedule, clipped values and whole rewards it takes 3 times as many
                    # iterations to learn; the work of an iteration is the same.
                    reward_scaling=0.1,
                    vf_loss_coefficient=0.5,
                    entropy_cost=0.0,
                    discounting=0.99,
                    gae_lambda=0.95,
                    clipping_epsilon=0.2,
                    max_grad_norm=1.0,
                    network_factory=network_factory,
                    seed=workload.seed,
                    policy_params_fn=self._pause,
                )
        except BaseException as error:
            self._failure = error
            self._done.release()

    def _pause(self, env_steps: int, make_policy: Any, params: Any) -> None:
        self._env_steps, self._policy, self._params = env_steps, make_policy, params
        self._done.release()
        self._asked.acquire()

    def _wait(self) -> None:
        self._done.acquire()
        if self._failure is not None:
            raise self._failure

    def _see(self, function: Any, arguments: Any) -> None:
        self._jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr

    def first_iteration(self) -> dict[str, Any]:
        self.iterate(1)
        return {
            "matrix_gflops": matrix_gflops(self._jaxpr),
            "optimizer_steps": self.num_optimizer_steps(),
            "env_steps": self.num_env_steps(),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(self._params[1:])),
        }

    def iterate(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            self._asked.release()
            self._wait()

    def num_optimizer_steps(self) -> int:
        """Return what it was told to take: ``ppo.train`` does not show its optimizer."""
        return self._env_steps // self.workload.samples_per_iteration * self.workload.steps_per_iteration

    def num_env_steps(self) -> int:
        return self._env_steps

    def evaluate(self) -> float:
        return float(self._evaluate(self._policy, self._params).mean())

    def _lengths(self, make_policy: Any, params: Any) -> jax.Array:
        env = EpisodeWrapper(VmapWrapper(self.env), self.env.task.max_episode_steps, 1)
        policy = make_policy(params, deterministic=True)
        key = jax.random.PRNGKey(0)
        start = env.reset(jax.random.split(key, NUM_EVALUATION_EPISODES))

        def one_step(carry: Any, _: None) -> tuple[Any, None]:
            state, running, lengths = carry
            state = env.step(state, policy(state.obs, key)[0])
            return (state, running * (1 - state.done), lengths + running), None

        ones = jnp.ones(NUM_EVALUATION_EPISODES)
        carry = (start, ones, 0 * ones)
        return jax.lax.scan(one_step, carry, length=self.env.task.max_episode_steps)[0][2]


@contextlib.contextmanager
def _seen_by(see: Callable[[Any, Any], None]) -> Iterator[None]:
    """Show an onlooker the function that is an iteration, and what it is given, when brax first calls it.

    For that ``jax.pmap`` is another one in this process until the context ends.
    """
    original = jax.pmap

    def pmap(function: Any, *arguments: Any, **named: Any) -> Any:
        compiled = original(function, *arguments, **named)
        if function.__name__ != "training_epoch":
            return compiled
        unseen = [True]

        def call(*inputs: Any) -> Any:
            if unseen:
                unseen.clear()
                see(compiled, inputs)
            return compiled(*inputs)

        return call

    jax.pmap = pmap
    try:
        yield
    finally:
        jax.pmap = original
