"""Train a task with its recipe for several seeds; draw and store the learning curves.

    python benchmarks/learning_curves.py cartpole_swingup --seeds 1,2,3 --save
    python benchmarks/learning_curves.py cartpole_swingup --ml_framework jax --algorithm sac --seeds 1,2,3 --save

Each seed is a run of ``lockstep train`` in a process of its own, one after the other; flags that this script does not
know are handed to it. With ``--save`` the picture and the numbers go to ``benchmarks/curves/<name>.{png,json}``,
otherwise to a temporary folder that is named at the end. The name is the task's, with framework and algorithm behind it
unless they are torch and PPO: ``cartpole_swingup_jax_sac``. A task that has metrics beside its reward gets a second
panel for them, and with torch the policy is also evaluated as it is before any training.
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


def train(task: str, seed: int, log_root: Path, extra: list[str]) -> Path:
    """Run one training; return its run directory."""
    command = [sys.executable, "-m", "lockstep", "train", task, "--seed", str(seed), "--log_root", str(log_root)]
    subprocess.run([*command, "--run_name", f"seed{seed}", *extra], check=True)
    (run,) = (log_root / task).glob(f"*_seed{seed}")
    return run


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl``."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untrained(run: Path) -> dict[str, float]:
    """Return the evaluation of the policy that a run with torch began with."""
    import torch

    from lockstep.core.config import load_overlay
    from lockstep.distributed.torch_comm import SoloComm
    from lockstep.learn.torch.evaluation import evaluate, summarise
    from lockstep.learn.torch.training import make_policy
    from lockstep.session.make_config import make_config
    from lockstep.session.make_env import build_env

    config = make_config(**load_overlay(run / "config.yaml") | {"device": "cpu"})
    env = build_env(config, num_envs=config.evaluation.num_episodes, streams="evaluation")
    with torch.inference_mode():
        return summarise(evaluate(make_policy(config, env), env), SoloComm())


def draw(title: str, runs: dict[int, list[dict[str, Any]]], path: Path) -> None:
    """Draw mean return and the task's metrics (lines) and evaluations without exploration (dots) over env steps."""
    from matplotlib import pyplot

    (first, *_) = runs.values()
    metrics = [name for name in first[-1] if name.startswith("metric/")]
    figure, grid = pyplot.subplots(
        1 + bool(metrics), figsize=(7, 7 if metrics else 4), layout="constrained", squeeze=False, sharex=True
    )
    axes, *more = grid[:, 0]
    for seed, records in runs.items():
        _plot(axes, records, "mean_return", f"seed {seed}")
        for below in more:
            for name in metrics:
                _plot(below, records, name, f"{name.removeprefix('metric/')}, seed {seed}")
    axes.set(title=title, ylabel="mean return (dots: evaluation)")
    for below in more:
        below.set(ylabel="metrics, means over env steps", ylim=(0, 1))
    for each in (axes, *more):
        each.grid(alpha=0.3)
        each.legend(frameon=False)
    (more or [axes])[-1].set_xlabel("million env steps")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plot(axes: Any, records: list[dict[str, Any]], name: str, label: str) -> None:
    """Plot a number of the training's episodes as a line and of evaluations as dots."""
    finished = [record for record in records if record.get(name) is not None]
    steps = [record["env_steps"] / 1e6 for record in finished]
    (line,) = axes.plot(steps, [record[name] for record in finished], label=label, linewidth=1)
    evaluated = [record for record in records if record.get(f"eval/{name}") is not None]
    steps = [record["env_steps"] / 1e6 for record in evaluated]
    axes.plot(steps, [record[f"eval/{name}"] for record in evaluated], "o", color=line.get_color())


def summary(
    task: str,
    runs: dict[int, list[dict[str, Any]]],
    first: dict[int, dict[str, float]],
    about: dict[str, Any],
    extra: list[str],
    times: bool,
) -> dict[str, Any]:
    """Return what is stored: how it was made, and of each seed the evaluations and, if wanted, the time it took.

    Args:
        task: its name.
        runs: by seed, the records of ``metrics.jsonl``.
        first: by seed, the evaluation before any training.
        about: versions, hardware and code when the first training began.
        extra: flags that were passed on.
        times: whether to store how long it took.
    """
    seeds = {
        str(seed): {
            **({"wall_s": round(records[-1]["wall_s"], 1)} if times else {}),
            "env_steps": records[-1]["env_steps"],
            "evaluations": {
                str(record["env_steps"]): round(record["eval/mean_return"], 1)
                for record in records
                if record.get("eval/mean_return") is not None
            },
            **_metrics(records, first.get(seed)),
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


def _metrics(records: list[dict[str, Any]], first: dict[str, float] | None) -> dict[str, Any]:
    """Return the metrics of the evaluations of a task that has some, that before any training under 0 env steps."""
    table = {
        str(record.get("env_steps", 0)): {
            name.removeprefix("eval/metric/"): round(value, 4)
            for name, value in record.items()
            if name.startswith("eval/metric/") and value is not None
        }
        for record in ([first] if first else []) + records
    }
    filled = {steps: row for steps, row in table.items() if row}
    return {"metrics": filled} if filled else {}


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
    about = describe()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    folders = {seed: train(arguments.task, seed, folder / "logs", extra) for seed in seeds}
    runs = {seed: records_of(run) for seed, run in folders.items()}
    target = HERE / "curves" if arguments.save else folder
    target.mkdir(exist_ok=True)
    draw(title, runs, target / f"{name}.png")
    first = {seed: untrained(run) for seed, run in folders.items()} if arguments.ml_framework == "torch" else {}
    text = json.dumps(summary(arguments.task, runs, first, about, extra, not arguments.no_times), indent=2)
    (target / f"{name}.json").write_text(text + "\n")
    print(f"{text}\n{target / name}.png")


if __name__ == "__main__":
    main()
