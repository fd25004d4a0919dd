"""A training script of your own: your policy and update, lockstep's envs, on as many processes as you start.

    python own_training_script.py
    torchrun --standalone --nproc_per_node=2 own_training_script.py
    lockstep train_multigpu --num_gpus 2 --script own_training_script.py

The update is REINFORCE with rewards to go. Lines that are there for several ranks say so; with one process they change
nothing.
"""

import lockstep  # before torch: this is where a rank is given a GPU of its own

# isort: split

import torch
from torch import nn
from torch.distributions import Categorical

from lockstep import distributed
from lockstep.envs.batch_env import BatchEnv

NUM_ENVS = 128  # on each rank
NUM_STEPS = 64
MAX_ITERATIONS = 60
GAMMA = 0.95


def main() -> None:
    place = lockstep.init(seed=1)  # ranks: meet here, before anything is built
    env = lockstep.make_env(
        "cartpole_classic", NUM_ENVS, seed=1, device=str(place.device), action_kind="discrete", max_episode_steps=500
    )
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).to(place.device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    distributed.broadcast_state(policy, optimizer)  # ranks: each has drawn other weights; take rank 0's

    for iteration in range(1, MAX_ITERATIONS + 1):
        log_probs, rewards_to_go, num_failures = collect(env, policy)
        # ranks: mean and standard deviation over the samples of all
        moments = distributed.merge_moments(distributed.moments_of(rewards_to_go.flatten()))
        advantages = (rewards_to_go - moments.mean) / (moments.std() + 1e-6)
        loss = -(log_probs * advantages.to(log_probs.dtype)).mean()
        optimizer.zero_grad()
        loss.backward()
        # ranks: the mean over the samples of all, then clip
        distributed.average_gradients(policy, num_samples=log_probs.numel()).require_finite()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

        metrics = distributed.reduce_metrics({"failures per step": (num_failures, log_probs.numel())})
        steps_between_failures = 1 / max(metrics["failures per step"], 1e-3)
        if iteration % 10 == 0:
            say(
                f"iteration {iteration}, {place.world_size} rank(s): a failure every {steps_between_failures:.0f} steps"
            )
        if steps_between_failures > 200:  # ranks: a reduced number, so all leave the loop together
            break
    save(policy)
    env.close()


def collect(env: BatchEnv, policy: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities and rewards to go, both (NUM_STEPS, num_envs), and how many poles fell."""
    log_probs, rewards, continues = [], [], []
    num_failures = torch.zeros((), device=env.device)
    observation = env.observations["actor"]
    for _ in range(NUM_STEPS):
        distribution = Categorical(logits=policy(observation))
        action = distribution.sample()
        transition = env.step(action)
        log_probs.append(distribution.log_prob(action))
        rewards.append(transition.reward - transition.terminated.float())  # the step that fails is worth nothing
        continues.append((~transition.done).float())
        num_failures += transition.terminated.sum()
        observation = transition.observations["actor"]
    rewards_to_go = torch.zeros(NUM_STEPS, env.num_envs, device=env.device)
    following = torch.zeros(env.num_envs, device=env.device)
    for step in reversed(range(NUM_STEPS)):
        following = rewards[step] + GAMMA * continues[step] * following
        rewards_to_go[step] = following
    return torch.stack(log_probs), rewards_to_go, num_failures


@distributed.main_only
def say(text: str) -> None:
    print(text, flush=True)


@distributed.main_only
def save(policy: nn.Module) -> None:
    torch.save(policy.state_dict(), "own_policy.pt")


if __name__ == "__main__":
    main()
