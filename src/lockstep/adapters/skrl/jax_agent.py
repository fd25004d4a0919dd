"""An agent of skrl, its networks and its memory, as a config asks for them (JAX)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from gymnasium import Space
from skrl import config as skrl_config

from lockstep.adapters.skrl.jax_actor import actor_layers
from lockstep.adapters.skrl.jax_memory import OwnMemory, RolloutMemory
from lockstep.adapters.skrl.jax_models import (
    CategoricalNetwork,
    GaussianNetwork,
    Network,
    SquashedNetwork,
    ValueNetwork,
    start,
)
from lockstep.adapters.skrl.jax_parts import InStepOptimizer, PooledKl, SharedScaler, SharedValueScaler
from lockstep.adapters.skrl.settings import OWN_POLICY, SCALER, agent_settings
from lockstep.adapters.skrl.shared import (
    PREPROCESSORS,
    QUIET,
    agent_class,
    look_up,
    look_up_scaler,
    refusals_in_words,
    spaces_of,
)
from lockstep.core.errors import RunError
from lockstep.core.rng import stream_seed
from lockstep.core.types import ActionSpace, Task
from lockstep.distributed.jax_guests import Exchange
from lockstep.learn.agent_config import PpoConfig, ReplayConfig
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.networks import Mlp

_OF_STATES = ("states",)
_OF_BOTH = ("states", "taken_actions")


def make_agent(config: TrainConfig, task: Task, exchange: Exchange, shares: Sequence[int], kl: PooledKl) -> Any:
    """Return an agent, ready to act and to learn, whose gradients are averaged over the samples of all ranks.

    Args:
        config: of the run, checked.
        task: of the envs.
        exchange: between the ranks.
        shares: envs of each rank.
        kl: pools the divergence that a schedule goes by.

    Raises:
        UsageError: ``config.library`` has something that the library does not take.
        RunError: the library was loaded before, as one that joins processes by itself.
    """
    if skrl_config.jax.is_distributed:
        raise RunError(
            f"skrl was loaded with JAX_WORLD_SIZE {skrl_config.jax.world_size} and joins processes by itself; let "
            "lockstep load it"
        )
    rank, device = exchange.rank, exchange.device
    skrl_config.jax.device = device
    skrl_config.jax.key = stream_seed(config.seed, "policy") % 2**32
    kind, known = agent_class("jax", config.algorithm)
    settings = agent_settings(config, task.action_space, shares, rank, known)
    named_spaces = spaces_of(task, has_critic=True)
    with refusals_in_words(config):
        agent = kind(
            models=Networks(config, task, named_spaces, device, rank).of_algorithm(),
            memory=_memory(config, shares, exchange),
            cfg=_looked_up(settings, named_spaces, exchange, kl),
            device=device,
            **named_spaces,
        )
    agent.init()
    if config.algorithm in OWN_POLICY:
        agent.memory.value_scaler = scalers_of(agent).get("value")
    agent.enable_training_mode(True)
    for name in optimizers_of(agent):
        inner = getattr(agent, f"{name}_optimizer")
        setattr(agent, f"{name}_optimizer", InStepOptimizer(inner, exchange, f"gradient of {name}"))
    return agent


def optimizers_of(agent: Any) -> list[str]:
    """Return what an agent has optimizers of."""
    names = ("policy", "value", "critic_1", "critic_2", "entropy")
    return [name for name in names if getattr(agent, f"{name}_optimizer", None) is not None]


def scalers_of(agent: Any) -> dict[str, SharedScaler]:
    """Return an agent's normalisers by what they scale."""
    found = {name: getattr(agent, f"_{name}_preprocessor", None) for name in PREPROCESSORS}
    return {name: scaler for name, scaler in found.items() if isinstance(scaler, SharedScaler)}


def _memory(config: TrainConfig, shares: Sequence[int], exchange: Exchange) -> OwnMemory:
    """Return the rollout's memory, or the replay."""
    agent, where = config.agent, {"num_envs": shares[exchange.rank], "device": exchange.device}
    if isinstance(agent, ReplayConfig):
        return OwnMemory(memory_size=agent.capacity_per_env(sum(shares)), **where)
    return RolloutMemory(exchange=exchange, memory_size=agent.num_steps_per_env, **where)


class Networks:
    """The networks of each algorithm, with their first parameters: the same on every rank.

    Args:
        config: of the run.
        task: what they see and do.
        named_spaces: the same in the library's terms.
        device: of the parameters.
        rank: whose noise is its own.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        named_spaces: Mapping[str, Space[Any] | None],
        device: jax.Device,
        rank: int,
    ) -> None:
        self.config, self.agent, self.task = config, config.agent, task
        self.space: ActionSpace = task.action_space
        self._named: dict[str, Any] = {"space": self.space, "device": device, **named_spaces}
        self._rank = rank

    def of_algorithm(self) -> dict[str, Network]:
        """Return the networks by the names that the library has for them."""
        if self.config.algorithm in OWN_POLICY:
            made = {"policy": self._chooser(), "value": self._critic(_OF_STATES)}
        else:
            names = ("critic_1", "critic_2", "target_critic_1", "target_critic_2")
            made = {"policy": self._squashed(), **{name: self._critic(_OF_BOTH) for name in names}}
        sizes = {
            "observations": self.task.num_observations["actor"],
            "states": self.task.num_observations["critic"],
            "taken_actions": self.space.size,
        }
        for index, (role, network) in enumerate(made.items()):
            start(network, jax.random.fold_in(skrl_config.jax.key, index), sizes, role)
        return made

    def _chooser(self) -> Network:
        layers = actor_layers(self.config, self.space)
        if self.space.kind == "discrete":
            return CategoricalNetwork(layers=layers, **self._named)
        init_std = self.config.agent_as(PpoConfig).init_std
        return GaussianNetwork(layers=layers, init_log_std=math.log(init_std), **self._named)

    def _squashed(self) -> Network:
        key = jax.random.fold_in(skrl_config.jax.key, 1000 + self._rank)
        return SquashedNetwork(layers=actor_layers(self.config, self.space), compiled_key=key, **self._named)

    def _critic(self, sees: tuple[str, ...]) -> Network:
        layers = Mlp(self.agent.critic_hidden_dims, 1, self.agent.activation, last_gain=1.0)
        return ValueNetwork(layers=layers, sees=sees, **self._named)


def _looked_up(
    settings: Mapping[str, Any], named_spaces: Mapping[str, Space[Any] | None], exchange: Exchange, kl: PooledKl
) -> dict[str, Any]:
    """Return what the agent's configuration class takes: settings with classes in place of their names.

    Raises:
        UsageError: there is no class of a name.
    """
    found = dict(settings)
    sizes = (named_spaces["observation_space"], named_spaces["state_space"], 1)
    for kind, size in zip(PREPROCESSORS, sizes, strict=True):
        known = {SCALER: SharedValueScaler if kind == "value" else SharedScaler}
        look_up_scaler(found, kind, known, {"size": size, "exchange": exchange, "device": exchange.device})
    schedules = {name: value for name, value in vars(optax).items() if name.endswith("_schedule")}
    look_up(found, "learning_rate_scheduler", {"KLAdaptiveLR": kl.kl_adaptive, **schedules})
    return found | {"experiment": QUIET}
