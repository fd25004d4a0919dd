"""An agent of skrl, its networks and its memory, as a config asks for them (torch)."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from gymnasium import Space
from skrl import config as skrl_config
from skrl.memories.torch import RandomMemory
from skrl.resources.noises import torch as noises
from torch.optim import lr_scheduler

from lockstep.adapters.skrl.settings import OWN_POLICY, SCALER, WITHOUT_CRITIC, agent_settings, linear_schedule
from lockstep.adapters.skrl.shared import (
    PREPROCESSORS,
    QUIET,
    agent_class,
    look_up,
    look_up_scaler,
    refusals_in_words,
    spaces_of,
)
from lockstep.adapters.skrl.torch_memory import RolloutMemory
from lockstep.adapters.skrl.torch_models import (
    CategoricalNetwork,
    DeterministicNetwork,
    GaussianNetwork,
    Network,
    SharedScaler,
    SharedValueScaler,
    SquashedNetwork,
    SteeredLearningRate,
    perceptron,
)
from lockstep.core.errors import RunError
from lockstep.core.types import ActionSpace, Comm
from lockstep.distributed.torch_gradients import average_gradients
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.agent_config import PpoConfig, ReplayConfig
from lockstep.learn.config import TrainConfig

_SMALL_GAIN = 0.01
_OF_STATES = ("states",)
_OF_BOTH = ("states", "taken_actions")
_EXCHANGED_TOGETHER = (("policy", "value"), ("policy",), ("critic_1", "critic_2"), ("critic",), ("q_network",))
"""Networks whose gradients are complete at the same time, and asked for in this order."""


def make_agent(config: TrainConfig, env: BatchEnv, comm: Comm, shares: Sequence[int]) -> Any:
    """Return an agent, ready to act and to learn, whose gradients ``comm`` averages over the ranks.

    Args:
        config: of the run, checked.
        env: this rank's envs.
        comm: the ranks.
        shares: envs of each rank.

    Raises:
        UsageError: ``config.library`` has something that the library does not take.
    """
    if skrl_config.torch.world_size != comm.world_size:
        raise RunError(
            f"skrl was loaded with WORLD_SIZE {skrl_config.torch.world_size}, and there are {comm.world_size} ranks; "
            "let lockstep load it"
        )
    kind, known = agent_class("torch", config.algorithm)
    settings = agent_settings(config, env.task.action_space, shares, comm.rank, known)
    named_spaces = spaces_of(env.task, has_critic=config.algorithm not in WITHOUT_CRITIC)
    with refusals_in_words(config):
        agent = kind(
            models=Networks(config, env, named_spaces).of_algorithm(),
            memory=_memory(config, env, comm, sum(shares)),
            cfg=_looked_up(settings, named_spaces, comm, env.device),
            device=env.device,
            **named_spaces,
        )
    agent.init()
    agent.memory.value_scaler = agent.checkpoint_modules.get("value_preprocessor")
    agent.enable_training_mode(True)
    _exchange_by(comm, agent)
    return agent


def _memory(config: TrainConfig, env: BatchEnv, comm: Comm, total_envs: int) -> RandomMemory:
    """Return the rollout's memory, or the replay."""
    agent, where = config.agent, {"num_envs": env.num_envs, "device": env.device}
    if isinstance(agent, ReplayConfig):
        # With replacement, or each batch would cost a permutation of all of it.
        return RandomMemory(memory_size=agent.capacity_per_env(total_envs), replacement=True, **where)
    return RolloutMemory(comm=comm, memory_size=agent.num_steps_per_env, **where)


def _exchange_by(comm: Comm, agent: Any) -> None:
    """Have gradients averaged over the samples of all ranks, where the library asks for it and where it forgets to."""
    models: dict[str, Network] = agent.models
    served: set[str] = set()
    for names in _EXCHANGED_TOGETHER:
        if served.isdisjoint(names) and models.keys() >= set(names):
            served |= set(names)
            together = [models[name] for name in names]
            together[0].exchange = partial(_average, together, comm)
    optimizer = getattr(agent, "entropy_optimizer", None)
    if optimizer is not None:  # of the temperature, which the library steps by each rank's own gradient
        temperature, policy = agent.log_entropy_coefficient, models["policy"]
        optimizer.register_step_pre_hook(lambda *_: _average([temperature], comm, policy.num_samples))


def _average(parts: Sequence[Any], comm: Comm, num_samples: int) -> None:
    average_gradients(parts, num_samples, comm=comm)


class Networks:
    """The networks of each algorithm.

    Args:
        config: of the run.
        env: what they see and do.
        named_spaces: the same in the library's terms.
    """

    def __init__(self, config: TrainConfig, env: BatchEnv, named_spaces: dict[str, Space[Any] | None]) -> None:
        self.config, self.agent, self.sizes = config, config.agent, env.task.num_observations
        self.space: ActionSpace = env.task.action_space
        self._named: dict[str, Any] = {"space": self.space, "spaces": named_spaces, "device": env.device}

    def of_algorithm(self) -> dict[str, Network]:
        """Return the networks by the names that the library has for them."""
        algorithm = self.config.algorithm
        if algorithm in OWN_POLICY:
            return {"policy": self._chooser()} | ({} if algorithm == "cem" else {"value": self._critic(_OF_STATES)})
        if algorithm == "sac":
            return {"policy": self._squashed()} | self._critics("critic_1", "critic_2")
        if algorithm == "td3":
            return self._targeted("policy", self._bounded) | self._critics("critic_1", "critic_2")
        if algorithm == "ddpg":
            return self._targeted("policy", self._bounded) | self._critics("critic")
        return self._targeted("q_network", self._q_network)

    def _actor_layers(self, num_outputs: int, gain: float) -> Any:
        widths = (self.sizes["actor"], *self.agent.actor_hidden_dims, num_outputs)
        return perceptron(widths, self.agent.activation, gain)

    def _chooser(self) -> Network:
        layers = self._actor_layers(self.space.size, _SMALL_GAIN)
        if self.space.kind == "discrete":
            return CategoricalNetwork(layers, **self._named)
        init_std = self.agent.init_std if isinstance(self.agent, PpoConfig) else 1.0
        return GaussianNetwork(layers, init_std, **self._named)

    def _squashed(self) -> Network:
        return SquashedNetwork(self._actor_layers(2 * self.space.size, _SMALL_GAIN), **self._named)

    def _bounded(self) -> Network:
        return DeterministicNetwork(self._actor_layers(self.space.size, _SMALL_GAIN), "tanh", **self._named)

    def _q_network(self) -> Network:
        return DeterministicNetwork(self._actor_layers(self.space.size, 1.0), **self._named)

    def _critic(self, sees: tuple[str, ...]) -> Network:
        num_inputs = self.sizes["critic"] + (self.space.size if sees == _OF_BOTH else 0)
        layers = perceptron((num_inputs, *self.agent.critic_hidden_dims, 1), self.agent.activation, 1.0)
        return DeterministicNetwork(layers, sees=sees, **self._named)

    def _critics(self, *names: str) -> dict[str, Network]:
        made: dict[str, Network] = {}
        for name in names:
            made |= self._targeted(name, lambda: self._critic(_OF_BOTH))
        return made

    def _targeted(self, name: str, make: Any) -> dict[str, Network]:
        """Return a network and its target, which the agent makes equal at the start."""
        return {name: make(), f"target_{name}": make()}


def _looked_up(
    settings: Mapping[str, Any], named_spaces: Mapping[str, Space[Any] | None], comm: Comm, device: torch.device
) -> dict[str, Any]:
    """Return what the agent's configuration class takes: settings with classes in place of their names.

    Raises:
        UsageError: there is no class of a name.
    """
    found = dict(settings)
    sizes = (named_spaces["observation_space"], named_spaces["state_space"], 1)
    for kind, size in zip(PREPROCESSORS, sizes, strict=True):
        known = {SCALER: SharedValueScaler if kind == "value" else SharedScaler}
        look_up_scaler(found, kind, known, {"size": size, "comm": comm, "device": device})
    look_up(found, "learning_rate_scheduler", {"KLAdaptiveLR": SteeredLearningRate} | _classes_of(lr_scheduler))
    for name in ("exploration_noise", "smooth_regularization_noise"):
        if look_up(found, name, _classes_of(noises)):
            found[f"{name}_kwargs"] = {**(found.get(f"{name}_kwargs") or {}), "device": device}
    if found.get("exploration_scheduler") is not None:
        found["exploration_scheduler"] = linear_schedule(found["exploration_scheduler"])
    return found | {"experiment": QUIET}


def _classes_of(module: ModuleType) -> dict[str, type]:
    return {name: kind for name, kind in vars(module).items() if isinstance(kind, type)}
