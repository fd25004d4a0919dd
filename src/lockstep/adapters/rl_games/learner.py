"""PPO of rl_games as a learner of lockstep's (rl-games 1.6.5)."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.adapters.rl_games.agent import make_agent, silence
from lockstep.adapters.rl_games.env import RlGamesEnv
from lockstep.adapters.rl_games.given import require_envs, require_equal_numbers
from lockstep.adapters.rl_games.policy import RlGamesPolicy, build_policy
from lockstep.adapters.rl_games.settings import params_of
from lockstep.core.errors import UsageError
from lockstep.core.rng import stream_seed
from lockstep.core.types import Comm, Task
from lockstep.distributed.torch_state import Replicated
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import PpoConfig, TrainConfig

_COUNTERS = ("epoch_num", "frame", "last_lr", "entropy_coef")
_CENTRAL_VALUE_COUNTERS = ("epoch_num", "lr")


class RlGamesLearner:
    """A ``GuestLearner``.

    What differs from rl_games' own runs, on one rank too:

    - Normalisers take up each sample once, after the update, and are frozen meanwhile.
    - Where the time limit ends an episode, the value of the observation that it ended at is added to the reward; that
      of the one before, as rl_games has it, would be a step late.

    torch's generator is seeded for every iteration, so a resumed training goes on bit for bit on as many ranks; but a
    memory (``agent.recurrent``) starts empty.
    """

    def __init__(self, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        agent = config.agent_as(PpoConfig)
        shares = config.envs_by_rank(comm.world_size)
        require_envs(shares)
        self._seed, self._rank = config.seed, comm.rank
        self._sees_more = _sees_more(env)
        by_rank = [params_of(config, env.task, share, self._sees_more) for share in shares]
        require_equal_numbers(by_rank)
        params = by_rank[comm.rank]
        self._follows = _follow_agent(config)
        has_central_value = "central_value_config" in params["config"]
        self._steps_per_iteration = sum(shares) * agent.num_steps_per_env
        self.agent = make_agent(copy.deepcopy(params), RlGamesEnv(env, has_central_value), comm)
        if self.agent.is_adaptive_lr:
            schedule = self.agent.scheduler.schedule
            schedule.min_lr, schedule.max_lr = agent.min_learning_rate, agent.max_learning_rate
        self.policy = RlGamesPolicy(
            self.agent.plain_model,
            env.task.num_observations["actor"],
            env.task.action_space,
            params["config"]["clip_actions"],
        )

    def require_ready(self) -> None:
        """Do nothing: it is ready when it is made."""

    def collect(self) -> None:
        """Step every env and keep what is learned from."""
        iteration = self.agent.epoch_num
        torch.manual_seed(stream_seed(self._seed, f"rl_games/iteration {iteration}/rank {self._rank}"))
        self.agent.collect()

    def update(self) -> Mapping[str, float]:
        """Learn from it; return losses and the like, means over this rank's samples."""
        losses: dict[str, float] = self.agent.learn()
        self.agent.frame += self._steps_per_iteration
        return losses

    def merge(self) -> None:
        """Let the normalisers take up all ranks' observations."""
        self.agent.merge()

    def replicated(self) -> Mapping[str, Replicated]:
        """Return networks, normalisers, optimizers and counters."""
        agent = self.agent
        objects: dict[str, Replicated] = {
            "model": agent.plain_model,
            "optimizer": agent.optimizer,
            "counters": _Counters(agent, _COUNTERS),
        }
        if agent.mixed_precision:
            objects["scaler"] = agent.scaler
        if agent.has_central_value:
            net = agent.central_value_net
            objects |= {
                "central value": agent.plain_central_value,
                "central value optimizer": net.optimizer,
                "central value counters": _Counters(net, _CENTRAL_VALUE_COUNTERS),
            }
        return objects

    def state_dict(self) -> dict[str, Any]:
        """Return the states of ``replicated``; ``model`` is as in a checkpoint of rl_games."""
        states = {name: entry.state_dict() for name, entry in self._stateful().items()}
        return states | {"sees_more": self._sees_more}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on every rank.

        Raises:
            UsageError: it has a central value network and this training has none, or the other way round.
        """
        self._require_same_critic(state)
        for name, entry in self._stateful().items():
            entry.load_state_dict(state[name])

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Begin with the networks and normalisers of a state alone.

        Raises:
            UsageError: as ``load_state_dict``.
        """
        self._require_same_critic(state)
        for name in ("model", "central value"):
            if name in self._stateful():
                self._stateful()[name].load_state_dict(state[name])

    def retune(self, learning_rate: float) -> None:
        """Take up another learning rate than the state's, unless ``library`` has one or it falls by itself."""
        agent = self.agent
        if self._follows["actor"] and not agent.linear_lr:
            agent.last_lr = learning_rate
            agent.update_lr(learning_rate)
        net = agent.central_value_net if agent.has_central_value else None
        if net is not None and self._follows["critic"] and not net.linear_lr:
            net.lr = learning_rate
            net.update_lr(learning_rate)

    def _require_same_critic(self, state: Mapping[str, Any]) -> None:
        if self.agent.has_central_value != ("central value" in state):
            raise UsageError(
                "the critic of the checkpoint and that of agent.* and library.* here are not of the same kind, one a "
                "network that sees what the actor sees, the other a central value network; use its settings",
                shared=True,
            )

    def _stateful(self) -> dict[str, Any]:
        return dict(self.replicated())

    @staticmethod
    def load_policy(config: TrainConfig, state: Mapping[str, Any], task: Task) -> RlGamesPolicy:
        """Return the policy of a state, on the CPU."""
        num_envs = config.num_envs if isinstance(config.num_envs, int) else max(config.num_envs)
        params = params_of(config, task, num_envs, state["sees_more"])
        with silence():
            return build_policy(params, state["model"], task)


def _follow_agent(config: TrainConfig) -> dict[str, bool]:
    """Return whether ``agent.learning_rate`` is the agent's, and whether it is that of a central value network."""
    settings = config.library.get("config") or {}
    central = settings.get("central_value_config") or {}
    return {"actor": "learning_rate" not in settings, "critic": "learning_rate" not in central}


class _Counters:
    """Some numbers of an agent, as what has a state."""

    def __init__(self, owner: Any, names: tuple[str, ...]) -> None:
        self._owner, self._names = owner, names

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in self._names:
            setattr(self._owner, name, state_dict[name])


def _sees_more(env: BatchEnv) -> bool:
    """Return whether the critic's observations are others than the actor's; envs just reset have the task's own.

    It is the task's code that says so, by giving one tensor for both, and not what happens to be in it.
    """
    return env.observations["actor"] is not env.observations["critic"]
