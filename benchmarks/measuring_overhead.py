"""What it costs to be measured: the same training with and without what ``lockstep benchmark training`` adds to it.

    .venv/bin/python benchmarks/measuring_overhead.py [--num_ranks 2] [--rounds 40] [--save]

Ranks train one policy together. In each round they run some iterations as ``lockstep train`` does, and as many with the
benchmark's meter and its sampler of resources at work; which comes first alternates. The ratio is taken round by round
from the time of the slowest rank. Nothing else of a benchmark happens while its clock runs.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
Round = dict[str, float]


def as_rank(arguments: argparse.Namespace) -> None:
    """Train and time as one rank of the job; rank 0 prints the seconds of all rounds."""
    import torch

    import lockstep
    from lockstep.benchmark.resources import Sampler
    from lockstep.benchmark.training.meter import Meter
    from lockstep.core.config import merge
    from lockstep.distributed.torch_exchange import gather_json
    from lockstep.distributed.torch_group import current
    from lockstep.learn.torch.training import Training
    from lockstep.recipes.catalog import recipe_of
    from lockstep.session.make_env import build_share
    from lockstep.session.process import keep_large_buffers

    lockstep.init("cpu")
    torch.set_num_threads(1)
    keep_large_buffers()
    comm = current()
    config = merge(recipe_of(arguments.task), {"num_envs": arguments.num_envs, "device": "cpu"})
    env = build_share(config, config.envs_by_rank(comm.world_size), comm.rank)
    training = Training(config, env, comm)
    for _ in range(arguments.warm_up):
        training.iterate()

    def plain() -> float:
        comm.gather_text("", "round")
        began = time.perf_counter()
        for _ in range(arguments.iterations):
            training.iterate()
        return time.perf_counter() - began

    def measured() -> float:
        meet = lambda: comm.gather_text("", "round")  # noqa: E731
        meter = Meter(
            lambda: training.own_times, comm.take_waits, meet, Sampler(None), warm_up=0, iterations=arguments.iterations
        )
        for _ in range(arguments.iterations):
            meter.record(training.iterate())
        return meter.wall_s

    rounds = []
    for number in range(arguments.rounds):
        order = (plain, measured) if number % 2 == 0 else (measured, plain)
        own = {side.__name__: side() for side in order}
        slowest = {name: max(each[name] for each in gather_json(own, comm, "round")) for name in own}
        rounds.append(slowest)
    if comm.rank == 0:
        print(json.dumps({"rounds": rounds, "num_envs": env.num_envs}), flush=True)


def launch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what rank 0 of a job has printed."""
    words = ["--as_rank", *sys.argv[1:]]
    command = [sys.executable, "-m", "lockstep", "train_multigpu", "--num_gpus", str(arguments.num_ranks)]
    command += ["--device", "cpu", "--script", str(Path(__file__).resolve()), *words]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def show(values: list[float], form: str) -> str:
    low, *_, high = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):{form}} (p10 {low:{form}}, p90 {high:{form}})"


def main() -> None:
    arguments = parse()
    if arguments.as_rank:
        as_rank(arguments)
        return
    from lockstep.core.environment import describe

    load_before = os.getloadavg()[0]
    rounds: list[Round] = launch(arguments)["rounds"]
    ratios = [each["measured"] / each["plain"] - 1 for each in rounds]
    halves = [statistics.median(ratios[begin::2]) for begin in range(2)]
    machine = describe()
    git = machine["git"]["lockstep"] or {"commit": "unknown", "dirty": False}
    facts = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/measuring_overhead.py", *sys.argv[1:]]),
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version),
        "commit": git["commit"] + (" with changes" if git["dirty"] else ""),
        "CPU": f"{machine['hardware']['cpu']}, {arguments.num_ranks} of {machine['hardware']['num_cores']} cores",
        "load of the host": f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after",
        "workload": f"{arguments.task}, {arguments.num_ranks} ranks of {arguments.num_envs} envs, torch, gloo",
        "rounds": f"{arguments.rounds} of {arguments.iterations} iterations a side",
        "iteration without, ms": show([1e3 * each["plain"] / arguments.iterations for each in rounds], ".2f"),
        "overhead (time with / without - 1)": show(ratios, "+.2%"),
        "its median where plain came first, and where it came second": ", ".join(f"{half:+.2%}" for half in halves),
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    if arguments.save:
        path = FOLDER / "measuring" / f"overhead_{facts['date']}"
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps({"facts": facts, "rounds": rounds}, indent=1) + "\n")
        lines = ["# What it costs to be measured", "", *(f"- {name}: {value}" for name, value in facts.items())]
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cartpole_classic")
    parser.add_argument("--num_envs", type=int, default=1024, help="per rank")
    parser.add_argument("--num_ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--iterations", type=int, default=20, help="per round and side")
    parser.add_argument("--warm_up", type=int, default=10, help="iterations that are not counted")
    parser.add_argument("--save", action="store_true", help="write benchmarks/measuring/overhead_<date>.json and .md")
    parser.add_argument("--as_rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
