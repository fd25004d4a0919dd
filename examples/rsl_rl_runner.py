"""RSL-RL's own runner on lockstep's envs, as a script that uses RSL-RL already would have it.

It needs RSL-RL: pip install 'lockstep-rl[rsl-rl]'. To train with RSL-RL on several devices, and with lockstep's run
directory, resume and display, let lockstep run it instead: lockstep train_multigpu --rl_library rsl_rl.
"""

import statistics

import torch
from rsl_rl.runners import OnPolicyRunner

import lockstep

NETWORK = {"class_name": "MLPModel", "hidden_dims": [32, 32], "activation": "elu", "obs_normalization": True}
SETTINGS = {
    "num_steps_per_env": 16,
    "save_interval": 1000,
    "obs_groups": {"actor": ["actor"], "critic": ["critic"]},
    "actor": NETWORK | {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}},
    "critic": NETWORK,
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": 4,
        "num_mini_batches": 2,
        "learning_rate": 1e-3,
        "schedule": "adaptive",
        "desired_kl": 0.01,
        "gamma": 0.99,
        "lam": 0.95,
        "entropy_coef": 0.0,
    },
}


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)  # small networks gain nothing from more
    env = lockstep.make_rsl_rl_env("cartpole_balance", num_envs=128, device="cpu", max_episode_steps=100)
    runner = OnPolicyRunner(env, SETTINGS, log_dir="logs/rsl_rl", device="cpu")

    # The runner keeps the returns of the last 100 episodes.
    runner.learn(10, init_at_random_ep_len=True)
    before = statistics.mean(runner.logger.rewbuffer)
    runner.learn(30)
    after = statistics.mean(runner.logger.rewbuffer)
    print(f"mean return {before:.0f} after 10 iterations, {after:.0f} after 40, of at most 100")
    assert after > before + 15
    env.close()


if __name__ == "__main__":
    main()
