"""How wrong the forecast is about trainings that it was not fitted to, on the cores of one machine.

    .venv/bin/python benchmarks/forecast_error.py [--repeats 3] [--bundles DIR] [--save]

Makes bundles with ``lockstep benchmark training_multigpu``: of 1 and 2 ranks with few and many envs and small and large
networks, two ranks of them on a single core too (so that the model can learn what taking turns costs). A model is
fitted to these alone, and then foretells what it has not seen: twice as many ranks as cores, other numbers of envs and
other sizes of networks. Those are measured as well and compared. All settings are gone through ``--repeats`` times, one
after the other, so that whatever else the machine does hits all alike; what counts is the median of the repeats' median
iterations. Bundles that are in ``--bundles`` already are not made again.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from lockstep.benchmark.bundle import read_bundle
from lockstep.benchmark.forecast.model import Model, fit_model
from lockstep.benchmark.forecast.points import Point, read_points
from lockstep.benchmark.forecast.words import model_in_words
from lockstep.core.environment import describe

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """A training to measure: ranks, cores that they may use, envs of each rank, width of the hidden layers."""

    num_ranks: int
    num_cores: int
    num_envs: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.num_ranks}_ranks_{self.num_cores}_cores_{self.num_envs}_envs_{self.width}_wide"


FITTED = (
    *(
        Run(num_ranks, num_cores, num_envs, width)
        for width in (64, 256)
        for num_envs in (512, 2048)
        for num_ranks, num_cores in ((1, 2), (2, 2), (2, 1))
    ),
    # A third size of networks tells what grows with the width of the layers from what grows with the samples alone.
    Run(1, 2, 1024, 128),
    Run(2, 2, 1024, 128),
)
HELD_BACK = {
    "more ranks than cores": (
        Run(4, 2, 512, 64),
        Run(4, 2, 2048, 64),
        Run(4, 2, 512, 256),
        Run(4, 2, 1024, 96),
    ),
    "other numbers of envs": (
        Run(1, 2, 1024, 64),
        Run(2, 2, 1024, 64),
        Run(1, 2, 4096, 64),
        Run(2, 2, 4096, 64),
        Run(1, 2, 8192, 64),
        Run(2, 2, 1024, 256),
    ),
    "other sizes of networks": (
        Run(1, 2, 512, 96),
        Run(2, 2, 512, 96),
        Run(1, 2, 2048, 192),
        Run(2, 2, 2048, 192),
    ),
}


def wait_until_idle(arguments: argparse.Namespace) -> None:
    """Return when other processes leave the cores alone, or patience is at its end."""
    began = time.monotonic()
    while psutil.cpu_percent(interval=2.0) > 100 * arguments.most_busy:
        if time.monotonic() - began > arguments.patience:
            return


def measure(run: Run, path: Path, arguments: argparse.Namespace) -> str:
    """Make one bundle; return how it went.

    Raises:
        SystemExit: the benchmark failed.
    """
    dims = f"{run.width},{run.width}"
    tried = path.with_suffix(".tried")
    command = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[: run.num_cores]))]
    command += [sys.executable, "-m", "lockstep", "benchmark", "training_multigpu", arguments.task, "--device", "cpu"]
    command += ["--num_gpus", str(run.num_ranks), "--num_envs", str(run.num_envs), "--output", str(tried)]
    command += ["--agent.actor_hidden_dims", dims, "--agent.critic_hidden_dims", dims]
    # A rank with the machine to itself would compute large networks with two threads, all others with one.
    command += ["--num_torch_threads", "1"]
    command += ["--warm_up", str(arguments.warm_up), "--iterations", str(arguments.iterations)]
    least = None
    for _ in range(arguments.tries):
        wait_until_idle(arguments)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
        (point,) = points_of([tried])
        if least is None or point.disturbed < least.disturbed:
            least = point
            tried.replace(path)
        if least.disturbed <= arguments.most_busy:
            break
    tried.unlink(missing_ok=True)
    assert least is not None
    return f"{least.iteration_s * 1000:.0f} ms, other processes kept {least.disturbed:.0%} of the cores busy"


def measure_all(arguments: argparse.Namespace, folder: Path) -> dict[Run, list[Path]]:
    """Make the bundles that are not there yet; return those of each run."""
    runs = [*FITTED, *(run for runs in HELD_BACK.values() for run in runs)]
    made: dict[Run, list[Path]] = {run: [] for run in runs}
    for repeat in range(arguments.repeats):
        for run in runs:
            path = folder / f"{run.name}_{repeat}.json"
            if not path.exists():
                how = measure(run, path, arguments)
                print(f"repeat {repeat + 1}/{arguments.repeats}: {run.name}: {how}", flush=True)
            made[run].append(path)
    return made


def points_of(paths: Sequence[Path]) -> list[Point]:
    return read_points([(str(path), read_bundle(path)) for path in paths])


def compare(model: Model, made: dict[Run, list[Path]]) -> list[dict[str, Any]]:
    """Return prediction, measurement and error of each run that was held back."""
    rows = []
    for kind, runs in HELD_BACK.items():
        for run in runs:
            (point,) = points_of(made[run])
            seconds = [read_bundle(path).runtime.iteration_s.median for path in made[run]]  # type: ignore[union-attr]
            predicted = model.predict(point.setting)
            rows.append(
                {
                    "kind": kind,
                    **asdict(run),
                    "predicted_s": predicted.iteration_s,
                    "measured_s": point.iteration_s,
                    "least_s": min(seconds),
                    "most_s": max(seconds),
                    "error": predicted.iteration_s / point.iteration_s - 1,
                    "others_busy": point.disturbed,
                    "split": asdict(predicted),
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| held back | ranks | cores | envs per rank | width | foretold | measured (lowest .. highest) | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{row['measured_s'] * 1000:.0f} ms ({row['least_s'] * 1000:.0f} .. {row['most_s'] * 1000:.0f})"
        lines.append(
            f"| {row['kind']} | {row['num_ranks']} | {row['num_cores']} | {row['num_envs']} | {row['width']} "
            f"| {row['predicted_s'] * 1000:.0f} ms | {spread} | {row['error']:+.1%} |"
        )
    return lines


def errors_in_words(rows: Sequence[dict[str, Any]]) -> str:
    errors = [abs(row["error"]) for row in rows]
    return f"median {statistics.median(errors):.1%}, worst {max(errors):.1%}"


def main() -> None:
    arguments = parse()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.bundles or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        made = measure_all(arguments, folder)
        fitted = points_of([path for run in FITTED for path in made[run]])
        model = fit_model(fitted)
        rows = compare(model, made)
    machine = describe()
    git = machine["git"]["lockstep"] or {"commit": "unknown", "dirty": False}
    facts = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/forecast_error.py", *sys.argv[1:]]),
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version),
        "commit": git["commit"] + (" with changes" if git["dirty"] else ""),
        "CPU": f"{machine['hardware']['cpu']}, {machine['hardware']['num_cores']} cores",
        "load of the host": f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after",
        "most of the cores that other processes kept busy": f"{max(row['others_busy'] for row in rows):.0%}",
        "workload": f"{arguments.task}, a thread for each rank, otherwise its recipe, torch, gloo",
        "each setting": f"{arguments.repeats} times {arguments.iterations} iterations, {arguments.warm_up} before that",
        "fitted to": f"{len(fitted)} settings: " + ", ".join(run.name for run in FITTED),
        "error, all held back": errors_in_words(rows),
    }
    for kind in HELD_BACK:
        facts[f"error, {kind}"] = errors_in_words([row for row in rows if row["kind"] == kind])
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    parts = [f"- {line}" for line in model_in_words(model)]
    print("\n" + "\n".join([*table(rows), "", *lines, *parts]))
    if arguments.save:
        path = FOLDER / "forecast" / facts["date"]
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
        text = ["# Error of the forecast on held-back trainings", "", "Seconds are those of the median iteration.", ""]
        text += [*lines, "", *table(rows), "", "The model:", "", *parts]
        path.with_suffix(".md").write_text("\n".join(text) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cartpole_classic")
    parser.add_argument("--repeats", type=int, default=3, help="of all settings")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--warm_up", type=int, default=2, help="iterations that are not counted")
    parser.add_argument("--most_busy", type=float, default=0.05, help="share of the cores, by other processes")
    parser.add_argument("--tries", type=int, default=3, help="of each measurement that is disturbed more")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for an idle machine each time")
    parser.add_argument("--bundles", type=Path, help="folder to keep the bundles in, and to take those there from")
    parser.add_argument("--save", action="store_true", help="write benchmarks/forecast/<date>.json and .md")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) != 2:
        parser.error("the settings are for 2 cores; use taskset -c 0,1")
    return arguments


if __name__ == "__main__":
    main()
