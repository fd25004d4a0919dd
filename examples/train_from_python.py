"""Train, then play the result: what the two commands do, from Python."""

import lockstep


def main() -> None:
    config = lockstep.make_config(
        "cartpole_classic", max_iterations=20, num_envs=512, agent={"num_steps_per_env": 16}, log_root="logs/examples"
    )
    outcome = lockstep.train(config)
    results = lockstep.play(outcome.run_path / "checkpoints" / "latest", num_episodes=32)
    print(f"{outcome.status}: mean return {results['mean_return']:.0f} over {results['num_episodes']} episodes")


if __name__ == "__main__":
    main()
