"""skrl's agents with torch as learners here."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.adapters.skrl import console as console
from lockstep.adapters.skrl.policy import SkrlPolicy, head_of, scaling_of
from lockstep.adapters.skrl.settings import OWN_POLICY, check_settings
from lockstep.adapters.skrl.torch_agent import make_agent
from lockstep.adapters.skrl.torch_memory import load_replay, replay_rows
from lockstep.adapters.skrl.torch_models import SharedScaler, SharedValueScaler, merge_scalers
from lockstep.adapters.skrl.tracking import take_numbers
from lockstep.core.rng import stream_seed
from lockstep.core.types import Comm, Task
from lockstep.distributed.torch_state import Replicated
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch import sharding
from lockstep.learn.torch.normalizer import Identity
from lockstep.learn.torch.perceptron import Perceptron

_SCHEDULERS = ("scheduler", "policy_scheduler", "critic_scheduler", "value_scheduler")
_RATES = ("lr", "initial_lr")
"""What a group of parameters has of its learning rate; the latter if there is a schedule."""


class SkrlLearner:
    """An agent of skrl on one rank: it acts, remembers and updates; what ranks must have in common is mended here.

    Gradients are averaged by the samples of each rank, the temperature's too; normalisers have the exact moments of all
    ranks' observations, each counted once per rollout, and stand still during an update. Advantages are normalised over
    all ranks. The KL divergence that steers the learning rate is the mean over ranks, however many samples each has:
    the library leaves no way to weigh it.

    Batches, permutations and noise are drawn from torch's generator, which gets a seed from the run's seed, the rank
    and the iteration. A replay is saved and dealt to the ranks by env.
    """

    def __init__(self, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        self.config, self.env, self.comm = config, env, comm
        table = comm.gather(torch.tensor([env.num_envs], device=env.device), "number of envs")
        shares = [int(share) for share in table[:, 0].tolist()]
        check_settings(config, env.task.action_space, shares)
        self._first_env = sum(shares[: comm.rank])
        self._is_discrete = env.task.action_space.kind == "discrete"
        self.agent = make_agent(config, env, comm, shares)
        self._modules: dict[str, Any] = {
            name: module for name, module in self.agent.checkpoint_modules.items() if module is not None
        }
        self._schedulers: dict[str, Any] = {
            name: getattr(self.agent, name) for name in _SCHEDULERS if getattr(self.agent, name, None) is not None
        }
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            name: module for name, module in self._modules.items() if isinstance(module, torch.optim.Optimizer)
        }
        self._first_rates = {
            name: [{key: group[key] for key in _RATES if key in group} for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }
        self._first_schedules = {name: copy.deepcopy(each.state_dict()) for name, each in self._schedulers.items()}
        self._scalers: dict[str, SharedScaler] = {
            name: module
            for name, module in self._modules.items()
            if isinstance(module, SharedScaler) and not isinstance(module, SharedValueScaler)
        }
        self.counters = Counters(self.agent)
        self._actor: Any = self._modules["policy" if "policy" in self._modules else "q_network"]
        normalizer = self._modules.get("observation_preprocessor") or Identity()
        space = env.task.action_space
        self.policy = SkrlPolicy(normalizer, self._actor.layers, head_of(config.algorithm, space), space)

    # --- iterations ------------------------------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Do nothing: it is ready when it is made."""

    @torch.no_grad()
    def collect(self) -> None:
        """Step every env, as the library's trainers do."""
        num_steps = self.config.agent.num_steps_per_env
        iteration = self.counters.timestep // num_steps
        torch.manual_seed(stream_seed(self.config.seed, f"skrl on rank {self.comm.rank} in iteration {iteration}"))
        seen: dict[str, list[torch.Tensor]] = {"observation_preprocessor": [], "state_preprocessor": []}
        for step in range(num_steps):
            observations, states = self._groups(self.env.observations)
            seen["observation_preprocessor"].append(observations)
            seen["state_preprocessor"].append(self.env.observations["critic"])
            time = self._time(self.counters.timestep)
            actions, _ = self.agent.act(observations, states, **time)
            transition = self.env.step(actions.squeeze(-1).long() if self._is_discrete else actions)
            next_observations, next_states = self._groups(transition.final_observations)
            self.agent.record_transition(
                observations=observations,
                states=states,
                actions=actions,
                # A copy, which the library adds what follows a time limit to.
                rewards=transition.reward.to(torch.float32, copy=True).unsqueeze(1),
                next_observations=next_observations,
                next_states=next_states,
                terminated=transition.terminated.unsqueeze(1),
                truncated=transition.truncated.unsqueeze(1),
                infos={},
                **time,
            )
            self.counters.timestep += 1
            if self.config.algorithm in OWN_POLICY and step < num_steps - 1:
                self.agent.post_interaction(**time)
        for name, scaler in self._scalers.items():
            scaler.see(torch.stack(seen[name]))

    def _time(self, timestep: int) -> dict[str, int]:
        return {"timestep": timestep, "timesteps": self.config.agent.num_steps_per_env * self.config.max_iterations}

    def _groups(self, observations: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the library's observations and states."""
        return observations["actor"], None if self.agent.state_space is None else observations["critic"]

    def update(self) -> dict[str, Any]:
        """Learn, once there is enough to learn from."""
        agent, time = self.agent, self._time(self.counters.timestep - 1)
        if self.config.algorithm in OWN_POLICY:
            agent.post_interaction(**time)
        elif time["timestep"] >= agent.cfg.learning_starts:
            agent.write_interval = 1  # without one, soft actor-critic does not tell its losses
            agent.enable_models_training_mode(True)
            agent.update(**time)
            agent.enable_models_training_mode(False)
            agent.write_interval = 0
        return self._numbers()

    def _numbers(self) -> dict[str, Any]:
        """Return what the agent has noted since the last time, by the names that it has in a run's metrics."""
        numbers = take_numbers(self.agent, is_discrete=self._is_discrete)
        numbers["learning_rate"] = next(iter(self._optimizers.values())).param_groups[0]["lr"]
        kl = getattr(self._schedulers.get("scheduler"), "kl", None)
        return numbers if kl is None else numbers | {"kl": kl}

    def merge(self) -> None:
        """Take up the observations of all ranks in the normalisers."""
        merge_scalers(list(self._scalers.values()), self.comm)

    def replicated(self) -> dict[str, Replicated]:
        """Return the networks, targets among them, optimizers, normalisers, schedules, the temperature and counters."""
        return {**self._modules, **self._schedulers, **self._temperature(), "counters": self.counters}

    def _temperature(self) -> dict[str, torch.Tensor]:
        temperature = getattr(self.agent, "log_entropy_coefficient", None)
        return {} if temperature is None else {"log_entropy_coefficient": temperature.data}

    # --- saving and continuing -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that ``replicated`` names, and the replay of all ranks on rank 0."""
        state: dict[str, Any] = {
            "modules": {name: module.state_dict() for name, module in self._modules.items()},
            "schedulers": {name: scheduler.state_dict() for name, scheduler in self._schedulers.items()},
            "temperature": self._temperature(),
            "counters": self.counters.state_dict(),
        }
        if self.config.algorithm not in OWN_POLICY:
            rows = sharding.gather(replay_rows(self.agent.memory), self.comm, self.env.device)
            state["replay"] = {"rows": rows, "place": self.agent.memory.memory_index}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the replay's rows are of all envs."""
        for name, module in self._modules.items():
            module.load_state_dict(state["modules"][name])
        for name in self._optimizers:
            if name.replace("optimizer", "scheduler") not in self._schedulers:
                self._begin_rates(name)  # which are fixed, so those of the config
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(state["schedulers"][name])
        for name, temperature in self._temperature().items():
            temperature.copy_(state["temperature"][name])
            self.agent._entropy_coefficient = temperature.exp()  # which the library makes of it where it learns
        self.counters.load_state_dict(state["counters"])
        if "replay" in state:
            own = slice(self._first_env, self._first_env + self.env.num_envs)
            rows = {name: tensor[own] for name, tensor in state["replay"]["rows"].items()}
            load_replay(self.agent.memory, rows, state["replay"]["place"])

    def retune(self, learning_rate: float) -> None:
        """Begin anew with the learning rates that the agent was made with, of which this is the config's."""
        for name in self._optimizers:
            self._begin_rates(name)
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(copy.deepcopy(self._first_schedules[name]))

    def _begin_rates(self, optimizer: str) -> None:
        for group, rates in zip(self._optimizers[optimizer].param_groups, self._first_rates[optimizer], strict=True):
            group.update(rates)

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Begin with the networks and normalisers of a state; optimizers are new."""
        for name, module in self._modules.items():
            if isinstance(module, nn.Module):
                module.load_state_dict(state["modules"][name])

    @staticmethod
    def load_policy(config: TrainConfig, state: Mapping[str, Any], task: Task) -> SkrlPolicy:
        """Return the policy of a state."""
        modules, space, size = state["modules"], task.action_space, task.num_observations["actor"]
        saved: Mapping[str, torch.Tensor] = modules["policy" if "policy" in modules else "q_network"]
        own = {name.removeprefix("layers."): tensor for name, tensor in saved.items() if name.startswith("layers.")}
        head = head_of(config.algorithm, space)
        num_outputs = 2 * space.size if head == "squashed" else space.size
        layers = Perceptron((size, *config.agent.actor_hidden_dims, num_outputs), config.agent.activation)
        layers.load_state_dict(own)
        kwargs = config.library.get("observation_preprocessor_kwargs") or {}
        normalizer = scaling_of(modules.get("observation_preprocessor"), size, kwargs)
        return SkrlPolicy(normalizer, layers, head, space)


class Counters:
    """What the agent counts, and the steps of each env so far.

    Attributes:
        timestep: the library's word for an env step of every env.
    """

    def __init__(self, agent: Any) -> None:
        self.timestep = 0
        self._agent = agent

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        updates = getattr(self._agent, "_update_counter", None)
        return {"timestep": self.timestep} | ({} if updates is None else {"updates": updates})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` returned."""
        self.timestep = state_dict["timestep"]
        if "updates" in state_dict:  # delays of the policy and of targets are counted in them
            self._agent._update_counter = state_dict["updates"]
