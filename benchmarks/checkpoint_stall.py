"""What a checkpoint costs the training: written at once, or by a thread beside it.

    .venv/bin/python benchmarks/checkpoint_stall.py [--rounds 15] [--iterations 3] [--folder DISK] [--save]

Two trainings, the recipe of ``cartpole_swingup`` as it is and one with networks of 3 x 1024 on few samples, each in a
process of its own. In each round the same training runs some iterations without a checkpoint, some after one that is
written at once, and some after one that a thread writes; the order changes from round to round. The stall is how long
``state_dict`` and the call that saves hold the training up. The loss is by how much those iterations and the call took
longer than the iterations without a checkpoint, so it also has what the thread takes from them: cores, memory, Python.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from lockstep.core.config import merge
from lockstep.core.environment import describe
from lockstep.core.registry import load
from lockstep.core.run_directory import RunDirectory
from lockstep.core.saves import BackgroundSaver
from lockstep.recipes.catalog import TASKS

FOLDER = Path(__file__).resolve().parent
MODES = ("none", "at once", "beside")
TASK = "cartpole_swingup"
# The large networks learn from few samples: how long an iteration takes is not the question.
WIDE = (1024, 1024, 1024)
FEW = {"num_steps_per_env": 8, "num_learning_epochs": 1, "actor_hidden_dims": WIDE, "critic_hidden_dims": WIDE}
TRAININGS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "3 x 1024": {"num_envs": 64, "agent": FEW},
}

Round = dict[str, dict[str, float]]


def measure(settings: dict[str, Any], num_rounds: int, num_iterations: int, folder: str) -> dict[str, Any]:
    """Return the size of a training's checkpoint and, for each round and mode, stall and whole time in seconds."""
    from lockstep.distributed.torch_comm import SoloComm
    from lockstep.learn.torch.checkpoint import snapshot
    from lockstep.learn.torch.training import Training
    from lockstep.session.make_env import build_env
    from lockstep.session.process import prepare

    config = merge(load(TASKS.get(TASK).recipe)(), {"device": "cpu"} | settings)
    prepare(config, 0)
    training = Training(config, build_env(config), SoloComm())
    run = RunDirectory.create(folder, TASK, "", "", {})
    saver = run.saver(2, lambda: None)
    for _ in range(2):
        training.iterate()
        _save(saver, training, snapshot)
        saver.wait()
    rounds: list[Round] = []
    for number in range(num_rounds):
        times: Round = {}
        for place in range(len(MODES)):
            mode = MODES[(number + place) % len(MODES)]
            began_s = time.perf_counter()
            if mode != "none":
                _save(saver, training, snapshot)
            if mode == "at once":
                saver.wait()
            stall_s = time.perf_counter() - began_s
            for _ in range(num_iterations):
                training.iterate()
            whole_s = time.perf_counter() - began_s
            saver.wait()  # what the iterations left over is measured nowhere, so they should be long enough
            rest_s = time.perf_counter() - began_s - whole_s
            times[mode] = {"stall_s": stall_s, "whole_s": whole_s, "rest_s": rest_s}
        rounds.append(times)
    errors = [saved.error for saved in saver.take_results() if saved.error is not None]
    if errors:
        raise SystemExit(str(errors[0]))
    return {"megabytes": run.checkpoints()[0].stat().st_size / 1e6, "rounds": rounds}


def _save(saver: BackgroundSaver, training: Any, snapshot: Any) -> None:
    content = training.state_dict()
    saver.start(training.iteration, lambda: snapshot(content))


def table(results: dict[str, Any]) -> str:
    """Return medians (min .. max) over rounds as a table."""
    header = "stall at once, ms | stall beside, ms | loss at once, ms | loss beside, ms | left over, ms"
    lines = [f"| training | MB | {header} |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for name, result in results.items():
        rounds = result["rounds"]
        cells = [_spread([times[mode]["stall_s"] for times in rounds]) for mode in MODES[1:]]
        # Paired: round by round, since a busy machine drifts.
        cells += [_spread([each[mode]["whole_s"] - each["none"]["whole_s"] for each in rounds]) for mode in MODES[1:]]
        cells.append(_spread([times["beside"]["rest_s"] for times in rounds]))
        lines.append(f"| {name} | {result['megabytes']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    middle, least, most = (1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{middle:.1f} ({least:.1f} .. {most:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=3, help="after each checkpoint")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="on whose disk runs are made for a while")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/checkpoints/")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    context = multiprocessing.get_context("spawn")
    results = {}
    for name, settings in TRAININGS.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="runs_") as folder, context.Pool(1) as pool:
            results[name] = pool.apply(measure, (settings, arguments.rounds, arguments.iterations, folder))
    facts = _facts(arguments, load_before)
    shown = "\n".join(["\n".join(f"- {name}: {value}" for name, value in facts.items()), "", table(results)])
    print(shown)
    if arguments.save:
        path = FOLDER / "checkpoints" / f"stall_{facts['date']}"
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps({"facts": facts, "results": results}, indent=1) + "\n")
        title = "# What a checkpoint costs the training\n\nMedian over rounds (lowest .. highest)."
        path.with_suffix(".md").write_text(f"{title}\n\n{shown}\n")


def _facts(arguments: argparse.Namespace, load_before: float) -> dict[str, str]:
    """Return what a reader of the result must know of how it came about."""
    machine = describe()
    git = machine["git"]["lockstep"] or {"commit": "unknown", "dirty": False}
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/checkpoint_stall.py", *sys.argv[1:]]),
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version),
        "commit": git["commit"] + (" with changes" if git["dirty"] else ""),
        "CPU": f"{machine['hardware']['cpu']}, {len(os.sched_getaffinity(0))} cores",
        "load of the host": f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after",
        "rounds": f"{arguments.rounds}, {arguments.iterations} iterations after each checkpoint",
    }


if __name__ == "__main__":
    main()
