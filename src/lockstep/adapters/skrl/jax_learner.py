"""skrl's agents with JAX as learners here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.adapters.skrl import console as console
from lockstep.adapters.skrl.jax_actor import SkrlActor
from lockstep.adapters.skrl.jax_agent import make_agent, optimizers_of, scalers_of
from lockstep.adapters.skrl.jax_parts import PooledKl, merge_scalers
from lockstep.adapters.skrl.settings import OWN_POLICY, check_settings
from lockstep.adapters.skrl.tracking import take_numbers
from lockstep.core.rng import stream_seed
from lockstep.distributed.jax_guests import Exchange
from lockstep.envs.jax_env import Transition
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.stepped_env import SteppedEnv

PyTree = Any
_RATES = ("policy", "value", "critic")


class SkrlLearner:
    """An agent of skrl on one rank: it acts, remembers and updates; what ranks must have in common is mended here.

    Gradients are averaged by the samples of each rank, the temperature's too, and clipped after that; the KL divergence
    that steers the learning rate is that of all samples; normalisers have the exact moments of all ranks' observations,
    each counted once per rollout, and stand still during an update. Advantages are normalised over all ranks.

    Noise and batches follow from the run's seed, the rank and the iteration. A replay is saved and dealt to the ranks
    by env.
    """

    actor_of = SkrlActor

    def __init__(self, config: TrainConfig, env: SteppedEnv, exchange: Exchange, total_envs: int) -> None:
        self.config, self.env, self.exchange = config, env, exchange
        shares = config.envs_by_rank(exchange.ranks.num_ranks)
        check_settings(config, env.task.action_space, shares)
        self._kl = PooledKl(exchange)
        self.agent = make_agent(config, env.task, exchange, shares, self._kl)
        self.actor = SkrlActor(config, env.task)
        self._scalers = scalers_of(self.agent)
        self._first_rates = self._rates()
        self._is_discrete = env.task.action_space.kind == "discrete"
        self._noise_key = jax.random.PRNGKey(stream_seed(config.seed, "noise") % 2**32)

    # --- iterations ------------------------------------------------------------------------------------------------

    def collect(self, iteration: int) -> None:
        """Step every env, as the library's trainers do."""
        key = jax.random.fold_in(self._noise_key, self.exchange.rank)
        self.agent.policy.reseed(jax.random.fold_in(key, iteration))
        self.agent.memory.reseed((self.config.seed, self.exchange.rank, iteration))
        seen: dict[str, list[jax.Array]] = {"observation": [], "state": []}
        for _ in range(self.config.agent.num_steps_per_env):
            time, now = self._time(self.env.num_steps), self.env.observations
            seen["observation"].append(now["actor"])
            seen["state"].append(now["critic"])
            actions, _ = self.agent.act(now["actor"], now["critic"], **time)
            transition = self.env.step(actions.reshape(-1).astype(jnp.int32) if self._is_discrete else actions)
            rewards, terminated, truncated = _columns(transition)
            self.agent.record_transition(
                observations=now["actor"],
                states=now["critic"],
                actions=actions,
                rewards=rewards,
                # Of the step itself, before any reset: a value there is worth something where time was up.
                next_observations=transition.final_observations["actor"],
                next_states=transition.final_observations["critic"],
                terminated=terminated,
                truncated=truncated,
                infos={},
                **time,
            )
        self._seen = seen

    def _time(self, timestep: int) -> dict[str, int]:
        return {"timestep": timestep, "timesteps": self.config.agent.num_steps_per_env * self.config.max_iterations}

    def update(self) -> dict[str, float]:
        """Learn, once there is enough to learn from; then take up the observations of all ranks in the normalisers."""
        agent, time = self.agent, self._time(self.env.num_steps - 1)
        if self.config.algorithm in OWN_POLICY or time["timestep"] >= agent.cfg.learning_starts:
            agent.write_interval = 1  # without one, soft actor-critic does not tell its losses
            agent.enable_models_training_mode(True)
            agent.update(**time)
            agent.enable_models_training_mode(False)
            agent.write_interval = 0
        seen = {name: jnp.stack(rows) for name, rows in self._seen.items() if name in self._scalers}
        self._seen = {}
        scalers = [self._scalers[name] for name in seen]
        merge_scalers(scalers, list(seen.values()), self.exchange, "moments of observations")
        return self._numbers()

    def _numbers(self) -> dict[str, float]:
        """Return what the agent has noted since the last time, by the names that it has in a run's metrics."""
        numbers = take_numbers(self.agent, is_discrete=self._is_discrete)
        numbers["learning_rate"] = float(self.agent.policy_learning_rate)
        return numbers if self._kl.kl is None else numbers | {"kl": self._kl.kl}

    # --- what goes on ----------------------------------------------------------------------------------------------

    def state(self) -> PyTree:
        """Return networks, targets among them, optimizers, learning rates, normalisers, and where the replay is."""
        agent = self.agent
        state: dict[str, Any] = {
            "networks": {name: model.state_dict.params for name, model in agent.models.items()},
            "optimizers": {name: getattr(agent, f"{name}_optimizer").state for name in optimizers_of(agent)},
            "rates": self._rates(),
            "normalizers": {name: scaler.moments() for name, scaler in self._scalers.items()},
        }
        if hasattr(agent, "log_entropy_coefficient"):
            state["log_temperature"] = agent.log_entropy_coefficient.value
        if self.config.algorithm not in OWN_POLICY:
            state["replay"] = {"index": np.int32(agent.memory.memory_index), "filled": np.bool_(agent.memory.filled)}
        return state

    def _rates(self) -> dict[str, np.float64]:
        found = {name: getattr(self.agent, f"{name}_learning_rate", None) for name in _RATES}
        return {name: np.float64(rate) for name, rate in found.items() if rate is not None}

    def rows(self) -> PyTree:
        """Return the replay, a row ``(capacity, size)`` of each env; a rollout is used up when an iteration is over."""
        if self.config.algorithm in OWN_POLICY:
            return {}
        return {name: np.asarray(tensor).swapaxes(0, 1) for name, tensor in self.agent.memory.tensors.items()}

    def row_shapes(self) -> PyTree:
        """Return the shapes and dtypes of ``rows``."""
        if self.config.algorithm in OWN_POLICY:
            return {}
        return {
            name: jax.ShapeDtypeStruct((tensor.shape[1], tensor.shape[0], *tensor.shape[2:]), tensor.dtype)
            for name, tensor in self.agent.memory.tensors.items()
        }

    def put(self, state: PyTree, rows: PyTree | None = None) -> None:
        """Go on from such a state and such rows, in numpy; None leaves the rows as they are."""
        agent, device = self.agent, self.exchange.device
        for name, parameters in state["networks"].items():
            model = agent.models[name]
            model.state_dict = model.state_dict.replace(params=jax.device_put(parameters, device))
        for name, inner in state["optimizers"].items():
            optimizer = getattr(agent, f"{name}_optimizer")
            setattr(agent, f"{name}_optimizer", optimizer.with_state(jax.device_put(inner, device)))
        for name, rate in state["rates"].items():
            if getattr(agent, f"{name}_scheduler") is not None:  # else it is fixed in the optimizer
                setattr(agent, f"{name}_learning_rate", float(rate))
        for name, moments in state["normalizers"].items():
            self._scalers[name].put(moments)
        if "log_temperature" in state:
            temperature = agent.log_entropy_coefficient
            value = jax.device_put(state["log_temperature"], device)
            parameters = temperature.state_dict.params.copy({"params": value})
            temperature.state_dict = temperature.state_dict.replace(params=parameters)
            agent._entropy_coefficient = jnp.exp(value)  # which the library makes of it where it learns
        for name, table in (rows or {}).items():
            agent.memory.tensors[name] = jax.device_put(np.ascontiguousarray(table.swapaxes(0, 1)), device)
        if "replay" in state:
            agent.memory.memory_index = int(state["replay"]["index"])
            agent.memory.filled = bool(state["replay"]["filled"])

    def retune(self, learning_rate: float) -> None:
        """Begin anew with the learning rates that the agent was made with, of which this is the config's."""
        for name, rate in self._first_rates.items():
            setattr(self.agent, f"{name}_learning_rate", float(rate))

    def weights(self, state: PyTree) -> PyTree:
        """Return networks and normalisers."""
        return {name: state[name] for name in ("networks", "normalizers")}

    def with_weights(self, state: PyTree, weights: PyTree) -> PyTree:
        """Return the state with others in it."""
        return {**state, **weights}


@jax.jit
def _columns(transition: Transition) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rewards, ends and ends by time, each ``(num_envs, 1)``."""
    parts = (transition.reward.astype(jnp.float32), transition.terminated, transition.truncated)
    rewards, terminated, truncated = (part[:, None] for part in parts)
    return rewards, terminated, truncated
