"""Step the envs in a loop of your own: here with a hand-written controller instead of a learned policy."""

import torch

import lockstep


def main() -> None:
    env = lockstep.make_env("cartpole_balance", num_envs=64, randomize_initial_episode_length=False)
    gains = torch.tensor([[0.3, 6.0, 0.0, 0.6, 1.2]], device=env.device)  # position, sine, cosine, two velocities
    observations = env.reset()
    reward_sum = torch.zeros(env.num_envs, device=env.device)
    for _ in range(env.config.max_episode_steps):
        action = (observations["actor"] * gains).sum(1, keepdim=True)
        transition = env.step(action)
        reward_sum += transition.reward
        observations = transition.observations
    print(f"mean reward per step {reward_sum.mean() / env.config.max_episode_steps:.3f} of at most 1")
    env.close()


if __name__ == "__main__":
    main()
