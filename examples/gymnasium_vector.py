"""lockstep's envs in plain Gymnasium code: the cross-entropy method, with one linear controller in each env.

It needs Gymnasium: pip install 'lockstep-rl[gymnasium]'. Gymnasium knows lockstep's tasks once they are registered;
without a line of lockstep, put the module that registers them before the id:
gymnasium.make_vec("lockstep.session.gymnasium_envs:lockstep/cartpole_swingup-v0", num_envs=256).
"""

import gymnasium
import numpy as np

import lockstep

NUM_BEST = 25


def main() -> None:
    lockstep.register_gymnasium_envs()
    envs = gymnasium.make_vec("lockstep/cartpole_classic-v0", num_envs=256, max_episode_steps=200)
    size = envs.single_observation_space.shape[0]  # type: ignore[index]
    generator = np.random.default_rng(1)
    mean, spread = np.zeros(size), np.ones(size)
    scores = []
    for generation in range(6):
        gains = mean + spread * generator.standard_normal((envs.num_envs, size))
        observations, _ = envs.reset(seed=generation)
        returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
        while running.any():
            actions = np.clip((gains * observations).sum(1, keepdims=True), -1, 1).astype(np.float32)
            observations, rewards, terminated, truncated, _ = envs.step(actions)
            returns += running * rewards
            running &= ~(terminated | truncated)  # each env has begun its next episode, which does not count
        best = gains[np.argsort(returns)[-NUM_BEST:]]
        mean, spread = best.mean(0), best.std(0) + 0.1
        scores.append(returns.mean())
    print("mean return of each generation:", ", ".join(f"{score:.0f}" for score in scores), "of at most 200")
    assert scores[-1] > 2 * scores[0]
    envs.close()


if __name__ == "__main__":
    main()
