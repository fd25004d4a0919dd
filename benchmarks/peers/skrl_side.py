"""skrl's side: its PPO agent and step trainer, as its documentation sets them up, without writing anything."""

from importlib.metadata import version
from typing import Any

import gymnasium
import torch
from lean_torch_env import NUM_ACTIONS, NUM_OBSERVATIONS, LeanCartpole, mean_episode_length
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import Wrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.resources.schedulers.torch import KLAdaptiveLR
from skrl.trainers.torch import StepTrainer
from skrl.utils import set_seed
from torch import nn
from torch_work import num_steps, trained, work_of_iteration
from workload import Workload

SPACES = {
    "observation_space": gymnasium.spaces.Box(-float("inf"), float("inf"), (NUM_OBSERVATIONS,)),
    "action_space": gymnasium.spaces.Box(-1.0, 1.0, (NUM_ACTIONS,)),
}


class LeanEnv(Wrapper):
    """The lean cart-pole; skrl is handed the observations after resets, as by the simulators it wraps."""

    device, num_envs, state_space = torch.device("cpu"), 0, None
    observation_space, action_space = SPACES.values()

    def __init__(self, num_envs: int) -> None:
        self.lean, self.num_envs = LeanCartpole(num_envs), num_envs
        self._rewards = torch.ones(num_envs, 1)

    def reset(self) -> tuple[torch.Tensor, dict[str, Any]]:
        return self.lean.observations, {}

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        terminated, time_outs, _ = self.lean.step(actions)
        return self.lean.observations, self._rewards, terminated.unsqueeze(1), time_outs.unsqueeze(1), {}

    def state(self) -> None:
        return None

    def render(self, *_: Any, **__: Any) -> None:
        pass

    def close(self) -> None:
        pass


def layers(hidden_dims: tuple[int, ...], num_outputs: int) -> nn.Sequential:
    widths = (NUM_OBSERVATIONS, *hidden_dims)
    hidden = [layer for i, o in zip(widths, hidden_dims, strict=False) for layer in (nn.Linear(i, o), nn.ELU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], num_outputs))


class Policy(GaussianMixin, Model):
    def __init__(self, hidden_dims: tuple[int, ...]) -> None:
        Model.__init__(self, **SPACES, device="cpu")
        GaussianMixin.__init__(self, clip_log_std=False)
        self.net = layers(hidden_dims, NUM_ACTIONS)
        self.log_std = nn.Parameter(torch.zeros(NUM_ACTIONS))

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):
    def __init__(self, hidden_dims: tuple[int, ...]) -> None:
        Model.__init__(self, **SPACES, device="cpu")
        DeterministicMixin.__init__(self)
        self.net = layers(hidden_dims, 1)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


class SkrlSide:
    def __init__(self, workload: Workload, *, compiled: bool = False) -> None:
        self.workload = workload
        set_seed(workload.seed)
        self.env = LeanEnv(workload.num_envs)
        settings = {
            "rollouts": workload.num_steps_per_env,
            "learning_epochs": workload.num_learning_epochs,
            "mini_batches": workload.num_mini_batches,
            "learning_rate": workload.learning_rate,
            "learning_rate_scheduler": KLAdaptiveLR,
            "learning_rate_scheduler_kwargs": {"kl_threshold": workload.desired_kl},
            "grad_norm_clip": 1.0,
            "value_loss_scale": 1.0,
            "experiment": {"write_interval": 0, "checkpoint_interval": 0},
        }
        if workload.normalize_observations:
            settings["observation_preprocessor"] = RunningStandardScaler
            settings["observation_preprocessor_kwargs"] = {"size": self.env.observation_space, "device": "cpu"}
        self.agent = PPO(
            models={"policy": Policy(workload.hidden_dims), "value": Value(workload.hidden_dims)},
            memory=RandomMemory(memory_size=workload.num_steps_per_env, num_envs=workload.num_envs, device="cpu"),
            cfg=settings,
            device="cpu",
            **SPACES,
        )
        self._plain = (self.agent.policy.net, self.agent.value.net)
        self._trained = tuple(torch.compile(net) for net in self._plain) if compiled else self._plain
        self._use(self._trained)
        quiet = {"headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
        self.trainer = StepTrainer(env=self.env, agents=self.agent, cfg=quiet)
        self.versions = {"skrl": version("skrl"), "torch": torch.__version__}

    def first_iteration(self) -> dict[str, Any]:
        self._use(self._plain)  # what is compiled can't be counted
        work = work_of_iteration(self, trained(self.agent.optimizer))
        self._use(self._trained)
        return work

    def _use(self, nets: tuple[nn.Module, nn.Module]) -> None:
        self.agent.policy.net, self.agent.value.net = nets

    def iterate(self, num_iterations: int) -> None:
        for _ in range(num_iterations * self.workload.num_steps_per_env):
            self.trainer.train()
        self.agent.tracking_data.clear()  # as its own writer would: it grows otherwise

    def num_optimizer_steps(self) -> int:
        return num_steps(self.agent.optimizer)

    def num_env_steps(self) -> int:
        return self.env.lean.num_steps * self.env.num_envs

    @torch.inference_mode()
    def evaluate(self) -> float:
        def most_likely(observations: torch.Tensor) -> torch.Tensor:
            return self.agent.act(observations, None, timestep=0, timesteps=0)[1]["mean_actions"]

        self.agent.enable_training_mode(False)
        self._use(self._plain)  # another number of envs would be compiled for, perhaps slower
        length = mean_episode_length(most_likely)
        self._use(self._trained)
        return length
