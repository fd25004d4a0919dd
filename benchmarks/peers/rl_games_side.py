"""rl_games' side: the agent that its runner makes, iterated as its ``train`` does, without statistics and files."""

import tempfile
from importlib.metadata import version
from typing import Any

import gymnasium
import torch
from lean_torch_env import NUM_ACTIONS, NUM_OBSERVATIONS, LeanCartpole, mean_episode_length
from rl_games.common import env_configurations, vecenv
from rl_games.common.algo_observer import AlgoObserver
from rl_games.common.ivecenv import IVecEnv
from rl_games.torch_runner import Runner
from torch_work import num_steps, trained, work_of_iteration
from workload import Workload


class LeanEnv(IVecEnv):
    """The lean cart-pole; it clips actions itself."""

    def __init__(self, num_envs: int) -> None:
        self.lean = LeanCartpole(num_envs)
        self._rewards = torch.ones(num_envs)

    def reset(self) -> torch.Tensor:
        return self.lean.observations

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        _, time_outs, done = self.lean.step(actions)
        return self.lean.observations, self._rewards, done, {"time_outs": time_outs}

    def get_env_info(self) -> dict[str, Any]:
        return {
            "observation_space": gymnasium.spaces.Box(-float("inf"), float("inf"), (NUM_OBSERVATIONS,)),
            "action_space": gymnasium.spaces.Box(-1.0, 1.0, (NUM_ACTIONS,)),
        }


def make_params(workload: Workload, folder: str) -> dict[str, Any]:
    """Return what stands below ``params`` in a configuration file of rl_games."""
    spread = {"name": "const_initializer", "val": 0.0}
    space = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"}}
    config = {
        "name": "cartpole_classic",
        "env_name": "cartpole_classic",
        "device": "cpu",
        "num_actors": workload.num_envs,
        "horizon_length": workload.num_steps_per_env,
        "minibatch_size": workload.samples_per_iteration // workload.num_mini_batches,
        "mini_epochs": workload.num_learning_epochs,
        "normalize_input": workload.normalize_observations,
        "normalize_value": False,
        "normalize_advantage": True,
        "clip_actions": False,
        "reward_shaper": {"scale_value": 1.0},
        "gamma": 0.99,
        "tau": 0.95,
        "learning_rate": workload.learning_rate,
        "lr_schedule": "adaptive",
        "kl_threshold": workload.desired_kl,
        "truncate_grads": True,
        "grad_norm": 1.0,
        "entropy_coef": 0.0,
        "critic_coef": 2.0,  # halved there
        "e_clip": 0.2,
        "clip_value": True,
        "bound_loss_type": "none",
        "bounds_loss_coef": 0.0,
        "train_dir": folder,
        "print_stats": False,
    }
    return {
        "seed": workload.seed,
        "torch_threads": 1,
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": {
            "name": "actor_critic",
            "separate": True,
            "space": {"continuous": space | {"sigma_init": spread, "fixed_sigma": True}},
            "mlp": {"units": list(workload.hidden_dims), "activation": "elu", "initializer": {"name": "default"}},
        },
        "config": config,
    }


class RlGamesSide:
    def __init__(self, workload: Workload, *, compiled: bool = False) -> None:
        vecenv.register("lean", lambda config_name, num_actors, **_: LeanEnv(num_actors))
        env_configurations.register("cartpole_classic", {"vecenv_type": "lean", "env_creator": None})
        self._folder = tempfile.TemporaryDirectory()  # the agent makes an events file, come what may
        runner = Runner(AlgoObserver())  # the default one walks through the finished episodes in Python
        runner.load({"params": make_params(workload, self._folder.name)})
        self.agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
        self._model, self._compiled = self.agent.model, compiled
        self._compile()
        self.agent.init_tensors()
        self.agent.obs = self.agent.env_reset()
        self.env = self.agent.vec_env
        self.versions = {"rl_games": version("rl-games"), "torch": torch.__version__}

    def _compile(self) -> None:
        if self._compiled:  # as the runner does by default
            self.agent.model = torch.compile(self._model, mode="default")

    def first_iteration(self) -> dict[str, Any]:
        self.agent.model = self._model  # what is compiled can't be counted
        work = work_of_iteration(self, trained(self.agent.optimizer))
        self._compile()
        return work

    def iterate(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            self.agent.update_epoch()
            self.agent.train_epoch()
            self.agent.dataset.update_values_dict(None)  # gives its memory back, as ``train`` does

    def num_optimizer_steps(self) -> int:
        return num_steps(self.agent.optimizer)

    def num_env_steps(self) -> int:
        return self.env.lean.num_steps * self.env.lean.num_envs

    @torch.no_grad()
    def evaluate(self) -> float:
        # Not with the compiled model: another number of envs would have it compiled anew, and perhaps slower.
        self._model.eval()
        return mean_episode_length(lambda observations: self._model({"is_train": False, "obs": observations})["mus"])
