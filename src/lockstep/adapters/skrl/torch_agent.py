"""An agent of skrl, its networks and its memory, as a config asks for them (torch)."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from skrl import config as skrl_config
from skrl.memories.torch import RandomMemory
from skrl.resources.noises import torch as noises

from lockstep.adapters.skrl.settings import OWN_POLICY, SCALER, agent_settings, linear_schedule
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
from lockstep.core.errors import RunError, UsageError, in_one_line, nearest
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
    algorithm, space = config.algorithm, env.task.action_space
    module = importlib.import_module(f"skrl.agents.torch.{algorithm}")
    kind, described = getattr(module, algorithm.upper()), getattr(module, f"{algorithm.upper()}_CFG")
    known = {field.name: getattr(described(), field.name) for field in dataclasses.fields(described)}
    settings = agent_settings(config, space, shares, comm.rank, known)
    named_spaces = _spaces(config, env)
    models = Networks(config, env, named_spaces).of_algorithm()
    try:
        agent = kind(
            models=models,
            memory=_memory(config, env, comm, sum(shares)),
            cfg=_Lookup(settings, named_spaces, comm, env.device).all(),
            device=env.device,
            **named_spaces,
        )
    except TypeError as error:
        if not config.library:
            raise
        raise UsageError(f"library has something that skrl does not take: {in_one_line(error)}") from error
    agent.init()
    agent.memory.value_scaler = agent.checkpoint_modules.get("value_preprocessor")
    agent.enable_training_mode(True)
    _exchange_by(comm, agent)
    return agent


def _spaces(config: TrainConfig, env: BatchEnv) -> dict[str, Space[Any] | None]:
    """Return the library's spaces: its observations are our group ``actor``, its states ``critic``."""
    space, sizes = env.task.action_space, env.task.num_observations
    actions: Space[Any] = (
        spaces.Discrete(space.size)
        if space.kind == "discrete"
        else spaces.Box(-space.limit, space.limit, (space.size,), np.float32)
    )
    has_critic = config.algorithm not in ("cem", "dqn", "ddqn")
    return {
        "observation_space": spaces.Box(-np.inf, np.inf, (sizes["actor"],), np.float32),
        "state_space": spaces.Box(-np.inf, np.inf, (sizes["critic"],), np.float32) if has_critic else None,
        "action_space": actions,
    }


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


class _Lookup:
    """Settings with classes in place of their names."""

    def __init__(
        self, settings: Mapping[str, Any], named_spaces: Mapping[str, Any], comm: Comm, device: torch.device
    ) -> None:
        self._settings, self._spaces, self._comm, self._device = dict(settings), named_spaces, comm, device

    def all(self) -> dict[str, Any]:
        """Return what the agent's configuration class takes.

        Raises:
            UsageError: there is no class of a name.
        """
        found = self._settings
        for name in ("observation_preprocessor", "state_preprocessor", "value_preprocessor"):
            self._scaler(found, name)
        schedules = {"KLAdaptiveLR": SteeredLearningRate} | vars(torch.optim.lr_scheduler)
        self._class(found, "learning_rate_scheduler", schedules)
        for name in ("exploration_noise", "smooth_regularization_noise"):
            if self._class(found, name, vars(noises)):
                found[f"{name}_kwargs"] = {**(found.get(f"{name}_kwargs") or {}), "device": self._device}
        if found.get("exploration_scheduler") is not None:
            found["exploration_scheduler"] = linear_schedule(found["exploration_scheduler"])
        # The run directory has it all; an interval of 0 keeps the library from making folders and files.
        quiet = {"write_interval": 0, "checkpoint_interval": 0, "directory": ".", "experiment_name": "skrl"}
        return found | {"experiment": quiet}

    def _scaler(self, found: dict[str, Any], name: str) -> None:
        kinds = {SCALER: SharedValueScaler if name == "value_preprocessor" else SharedScaler}
        if not self._class(found, name, kinds):
            return
        size = {"observation": self._spaces["observation_space"], "state": self._spaces["state_space"], "value": 1}[
            name.partition("_")[0]
        ]
        if size is None:
            found[name] = None
            return
        own = {"size": size, "comm": self._comm, "device": self._device}
        found[f"{name}_kwargs"] = {**(found.get(f"{name}_kwargs") or {}), **own}

    def _class(self, found: dict[str, Any], name: str, kinds: Mapping[str, Any]) -> bool:
        """Put the class of a name in its place; return whether there is one."""
        wanted = found.get(name)
        if wanted is None:
            return False
        known = {each: kind for each, kind in kinds.items() if isinstance(kind, type)}
        if not isinstance(wanted, str) or wanted not in known:
            raise UsageError(f"library.{name} {wanted!r} is not known{nearest(str(wanted), known)}")
        found[name] = known[wanted]
        return True
