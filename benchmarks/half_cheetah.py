"""Train gymnasium/HalfCheetah-v5 with its recipe for 1M env steps and several seeds; compare with what others report.

    python benchmarks/half_cheetah.py --seeds 1,2,3,4,5 --save

Each seed is a run of ``lockstep train`` in a process of its own, one after the other; flags that this script does not
know are handed to it. A seed whose run is finished under ``--log_root`` already is not run again, so a comparison may
be made in several goes. With ``--save`` picture and numbers go to ``benchmarks/guests/half_cheetah.{png,json}``,
otherwise to a temporary folder that is named at the end.

What counts, as in most figures of others, is the mean return of the episodes that ended in the last 100 000 env steps
of the training, actions sampled. The exit code is 1 if the mean over seeds is not among what others report.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

sys.path.insert(0, str(Path(__file__).parent))
from learning_curves import records_of, train

from lockstep.core.runs import progress_of

matplotlib.use("Agg")

HERE = Path(__file__).parent
TASK = "gymnasium/HalfCheetah-v5"
LAST_STEPS = 100_000
_TIANSHOU = (
    "https://github.com/thu-ml/tianshou/blob/1da9b86cbaca85959a396abe999593cb565d3670/examples/mujoco/README.md#ppo"
)
PUBLISHED: tuple[dict[str, Any], ...] = (
    {
        "who": "CleanRL, ppo_continuous_action, v4",
        "mean": 1442.64,
        "deviation": 46.03,
        "address": "https://docs.cleanrl.dev/rl-algorithms/ppo/#ppo_continuous_actionpy",
    },
    {"who": "Spinning Up (PyTorch), v3, from its plot", "mean": 1670.0, "deviation": None, "address": _TIANSHOU},
    {"who": "OpenAI Baselines, v1, from its plot", "mean": 1700.0, "deviation": None, "address": _TIANSHOU},
    {
        "who": "PPO in Fujimoto et al. 2018 (TD3), table 1, v1",
        "mean": 1795.43,
        "deviation": None,
        "address": "https://arxiv.org/abs/1802.09477",
    },
    {
        "who": "CleanRL, ppo_fix_continuous_action (time limits bootstrapped), v4, seed 2 of 5",
        "mean": 1867.07,
        "deviation": 47.73,
        "address": "https://huggingface.co/sdpkjc/HalfCheetah-v4-ppo_fix_continuous_action-seed2",
    },
    {
        "who": "ikostrikov/pytorch-a2c-ppo-acktr-gail, v2, from its plot",
        "mean": 3120.0,
        "deviation": None,
        "address": _TIANSHOU,
    },
    {"who": "Tianshou, v3, 10 seeds, the best evaluation", "mean": 5783.9, "deviation": 1244.0, "address": _TIANSHOU},
)
"""PPO on HalfCheetah after 1M env steps: means and standard deviations as they stand there; read on 2026-12-01."""


def finished_run(log_root: Path, seed: int) -> Path | None:
    """Return the run of a seed that is finished already."""
    runs = (log_root / TASK).glob(f"*_seed{seed}")
    return next((run for run in runs if progress_of(run).get("status") == "finished"), None)


def final_return(records: list[dict[str, Any]]) -> float:
    """Return the mean over the episodes that ended in the last steps of the training."""
    since = records[-1]["env_steps"] - LAST_STEPS
    late = [each for each in records if each["env_steps"] > since and each["num_episodes"]]
    count = sum(each["num_episodes"] for each in late)
    return float(sum(each["mean_return"] * each["num_episodes"] for each in late) / count)


def draw(runs: dict[int, list[dict[str, Any]]], path: Path) -> None:
    """Draw the training's returns over env steps, and lines where others end."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    for number, (seed, records) in enumerate(runs.items()):
        finished = [record for record in records if record["mean_return"] is not None]
        steps, returns = zip(*((each["env_steps"] / 1e6, each["mean_return"]) for each in finished), strict=True)
        axes.plot(steps, returns, label=f"seed {seed}", linewidth=1.5, color=str(0.6 * number / len(runs)))
    for number, published in enumerate(PUBLISHED):
        axes.axhline(published["mean"], color=f"C{number}", linestyle=":", linewidth=1, label=published["who"])
    axes.set(title=f"{TASK}, PPO: episodes of the training", xlabel="million env steps", ylabel="mean return")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def summary(runs: dict[int, list[dict[str, Any]]], about: dict[str, Any], extra: list[str]) -> dict[str, Any]:
    """Return what is stored: how it was made, each seed's curve, and the comparison."""
    finals = {seed: final_return(records) for seed, records in runs.items()}
    mean = statistics.mean(finals.values())
    low = min(each["mean"] - (each["deviation"] or 0.0) for each in PUBLISHED)
    high = max(each["mean"] + (each["deviation"] or 0.0) for each in PUBLISHED)
    return {
        "date": datetime.date.today().isoformat(),
        "task": TASK,
        "command": f"lockstep train {TASK} --seed S {' '.join(extra)}".strip(),
        "versions": about["versions"] | {"gymnasium": version("gymnasium")},
        "commit": about["git"]["lockstep"],
        "cpu": f"{about['hardware']['cpu']}, {about['hardware']['num_allowed_cores']} cores",
        "mean_return": round(mean, 1),
        "standard_deviation_over_seeds": round(statistics.stdev(finals.values()), 1) if len(finals) > 1 else None,
        "published": list(PUBLISHED),
        "published_range": [round(low, 1), round(high, 1)],
        "in_range": low <= mean <= high,
        "seeds": {
            str(seed): {
                "env_steps": records[-1]["env_steps"],
                "mean_return": round(finals[seed], 1),
                "evaluation": round(records[-1]["eval/mean_return"], 1),
                "curve": {
                    str(each["env_steps"]): round(each["mean_return"], 1)
                    for each in records
                    if each["mean_return"] is not None
                },
            }
            for seed, records in runs.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3,4,5", help="comma-separated")
    parser.add_argument("--log_root", type=Path, help="where runs are, and are kept (default: a temporary folder)")
    parser.add_argument("--save", action="store_true", help="store into benchmarks/guests")
    arguments, extra = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="half_cheetah_"))
    log_root = arguments.log_root or folder / "logs"
    runs, about = {}, dict[str, Any]()
    for seed in (int(seed) for seed in arguments.seeds.split(",")):
        run = finished_run(log_root, seed) or train(TASK, seed, log_root, extra)
        runs[seed] = records_of(run)
        about = json.loads((run / "run.json").read_text())
    target = HERE / "guests" if arguments.save else folder
    target.mkdir(exist_ok=True)
    draw(runs, target / "half_cheetah.png")
    found = summary(runs, about, extra)
    (target / "half_cheetah.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "seeds"}, indent=2))
    for seed, each in found["seeds"].items():
        print(f"seed {seed}: {each['mean_return']} (evaluation without exploration {each['evaluation']})")
    print(target / "half_cheetah.png")
    return 0 if found["in_range"] else 1


if __name__ == "__main__":
    sys.exit(main())
