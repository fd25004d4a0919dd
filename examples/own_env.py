"""An env of your own and a training script of your own, on as many processes as you start.

    python own_env.py
    torchrun --standalone --nproc_per_node=2 own_env.py
    lockstep train_multigpu --num_gpus 2 --script own_env.py

The env is an ordinary one of Gymnasium, so lockstep's learner takes it too, from the folder that this file is in:

    lockstep train gymnasium/own_env:Reach-v0

The script is plain PyTorch, with the module wrapped in DistributedDataParallel, as many have it already. All that it
asks of lockstep is its place among the ranks.
"""

import lockstep  # before torch: this is where a rank is given a GPU of its own

# isort: split

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel

from lockstep import distributed

NUM_ENVS = 64  # on each rank
NUM_STEPS = 20  # an episode
MAX_ITERATIONS = 60


class Reach(gymnasium.Env[np.ndarray, np.ndarray]):
    """A point on a line goes where the target is; the reward is minus the distance, and an episode has 20 steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.position, self.target = self.np_random.uniform(-1, 1, 2)
        return self._look(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.position += 0.3 * float(np.clip(action[0], -1, 1))
        return self._look(), -abs(self.position - self.target), False, False, {}

    def _look(self) -> np.ndarray:
        return np.array([self.position, self.target], np.float32)


gymnasium.register("Reach-v0", f"{__name__}:Reach", max_episode_steps=NUM_STEPS)


def main() -> None:
    place = lockstep.init(seed=1)  # ranks: meet here, before anything is built
    envs = gymnasium.vector.SyncVectorEnv([Reach] * NUM_ENVS)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(place.device)
    # ranks: the wrapper averages gradients, and begins with rank 0's weights
    wrapped = DistributedDataParallel(policy) if place.world_size > 1 else policy
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    distance = 1.0
    for iteration in range(1, MAX_ITERATIONS + 1):
        loss, own_distance = play(envs, wrapped, place.device, 1000 * place.rank + iteration)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # ranks: every one of them has the mean over all, so all leave the loop together
        distance = distributed.reduce_metrics({"distance": own_distance})["distance"]
        if iteration % 10 == 0:
            say(f"iteration {iteration}, {place.world_size} rank(s): {distance:.3f} away")
        if distance < 0.1:
            break
    envs.close()
    assert distance < 0.2, f"the point is still {distance:.3f} away"


def play(
    envs: gymnasium.vector.VectorEnv[Any, Any, Any], policy: nn.Module, device: torch.device, seed: int
) -> tuple[torch.Tensor, float]:
    """Play an episode in every env; return the loss of REINFORCE and the mean distance in its second half."""
    observations, _ = envs.reset(seed=seed)
    seen, actions, rewards = [], [], []
    for _ in range(NUM_STEPS):
        seen.append(torch.as_tensor(observations, device=device))
        with torch.no_grad():
            actions.append(Normal(policy(seen[-1]), 0.3).sample())
        observations, reward, *_ = envs.step(actions[-1].cpu().numpy())
        rewards.append(torch.as_tensor(reward, dtype=torch.float32, device=device))
    reward = torch.stack(rewards)  # (NUM_STEPS, NUM_ENVS)
    # What an action is worth shows at once here: by how much the distance has shrunk.
    gains = torch.diff(reward, dim=0, prepend=-(seen[0][:, 0] - seen[0][:, 1]).abs().unsqueeze(0))
    # One forward pass of the wrapper for one backward pass, as it wants it.
    log_probs = Normal(policy(torch.stack(seen)), 0.3).log_prob(torch.stack(actions)).squeeze(-1)
    return -(log_probs * (gains - gains.mean()) / (gains.std() + 1e-6)).mean(), -float(reward[NUM_STEPS // 2 :].mean())


@distributed.main_only
def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
