"""Train a task with its recipe for several seeds; draw and store the learning curves.

    python benchmarks/learning_curves.py cartpole_swingup --seeds 1,2,3 --save
    python benchmarks/learning_curves.py cartpole_swingup --ml_framework jax --algorithm sac --seeds 1,2,3 --save

Each seed is a run of ``lockstep train`` in a process of its own, one after the other; flags that this script does not
know are handed to it. With ``--save`` the picture and the numbers go to ``benchmarks/curves/<name>.{png,json}``,
otherwise to a temporary folder that is named at the end. The name is the task's, with framework and algorithm behind it
unless they are torch and PPO: ``cartpole_swingup_jax_sac``.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

from lockstep.core.environment import describe

matplotlib.use("Agg")

HERE = Path(__file__).parent


def train(task: str, seed: int, log_root: Path, extra: list[str]) -> list[dict[str, Any]]:
    """Run one training; return the records of its ``metrics.jsonl``."""
    command = [sys.executable, "-m", "lockstep", "train", task, "--seed", str(seed), "--log_root", str(log_root)]
    subprocess.run([*command, "--run_name", f"seed{seed}", *extra], check=True)
    (run,) = (log_root / task).glob(f"*_seed{seed}")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(title: str, runs: dict[int, list[dict[str, Any]]], path: Path) -> None:
    """Draw mean return (lines) and the evaluations of the deterministic policy (dots) over env steps."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for seed, records in runs.items():
        finished = [record for record in records if record["mean_return"] is not None]
        steps = [record["env_steps"] / 1e6 for record in finished]
        (line,) = axes.plot(steps, [record["mean_return"] for record in finished], label=f"seed {seed}", linewidth=1)
        evaluated = [record for record in records if record.get("eval/mean_return") is not None]
        axes.plot(
            [record["env_steps"] / 1e6 for record in evaluated],
            [record["eval/mean_return"] for record in evaluated],
            "o",
            color=line.get_color(),
        )
    axes.set(title=title, xlabel="million env steps", ylabel="mean return (dots: evaluation)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def summary(task: str, runs: dict[int, list[dict[str, Any]]], extra: list[str], with_times: bool) -> dict[str, Any]:
    """Return what is stored: how it was made, and of each seed the evaluations and, if wanted, the time it took."""
    about = describe()
    seeds = {
        str(seed): {
            **({"wall_s": round(records[-1]["wall_s"], 1)} if with_times else {}),
            "env_steps": records[-1]["env_steps"],
            "evaluations": {
                str(record["env_steps"]): round(record["eval/mean_return"], 1)
                for record in records
                if record.get("eval/mean_return") is not None
            },
        }
        for seed, records in runs.items()
    }
    return {
        "date": datetime.date.today().isoformat(),
        "task": task,
        "command": f"lockstep train {task} --seed S {' '.join(extra)}".strip(),
        "versions": about["versions"],
        "commit": about["git"]["lockstep"],
        "cpu": f"{about['hardware']['cpu']}, {about['hardware']['num_allowed_cores']} cores",
        "seeds": seeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--ml_framework", default="torch", choices=("torch", "jax"))
    parser.add_argument("--algorithm", default="ppo", help="ppo, or sac (with jax)")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--save", action="store_true", help="store into benchmarks/curves")
    parser.add_argument("--no_times", action="store_true", help="store no wall_s: the machine had other work to do")
    arguments, passed_on = parser.parse_known_args()
    learner = {"ml_framework": arguments.ml_framework, "algorithm": arguments.algorithm}
    name, title, extra = arguments.task, arguments.task, passed_on
    if learner != {"ml_framework": "torch", "algorithm": "ppo"}:
        name = "_".join((arguments.task, *learner.values()))
        title = f"{arguments.task}, {arguments.algorithm.upper()} with {arguments.ml_framework}"
        extra = [*(word for key, value in learner.items() for word in (f"--{key}", value)), *passed_on]
    folder = Path(tempfile.mkdtemp(prefix="learning_curves_"))
    runs = {int(seed): train(arguments.task, int(seed), folder / "logs", extra) for seed in arguments.seeds.split(",")}
    target = HERE / "curves" if arguments.save else folder
    target.mkdir(exist_ok=True)
    draw(title, runs, target / f"{name}.png")
    text = json.dumps(summary(arguments.task, runs, extra, with_times=not arguments.no_times), indent=2)
    (target / f"{name}.json").write_text(text + "\n")
    print(f"{text}\n{target / name}.png")


if __name__ == "__main__":
    main()
