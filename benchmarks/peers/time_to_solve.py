"""How long each side takes from nothing to a solved ``cartpole_classic``, on one core, in one paired run.

    .venv/bin/python benchmarks/peers/time_to_solve.py [--sides lockstep_jax brax] [--seeds 1,2,3] [--save]

A process is started per side and seed, one after the other, and trains until 128 whole episodes with the most likely
actions last 475 of 500 steps in the mean (the mark that Gymnasium calls CartPole-v1 solved at). The clock begins with
the process: imports, building and compiling count, evaluations don't. Nothing compiled is kept from one process to the
next. The order of the sides turns with every seed.
"""

import argparse
import json
import os
from contextlib import closing
from dataclasses import replace
from datetime import date
from typing import Any

from contenders import CONTENDERS, FOLDER, REPOSITORY, Worker, set_up
from report import Spread, facts_of_run
from workload import Workload

LENGTH, MAX_ITERATIONS = 475.0, 300


def measure(name: str, core: int, workload: Workload) -> dict[str, Any]:
    """Start a side and let it train until it has solved the task."""
    with closing(Worker(name, core, workload)) as worker:
        found = worker.ask({"solve": {"length": LENGTH, "max_iterations": MAX_ITERATIONS}})
        return found | {"versions": worker.description["versions"]}


def main() -> None:
    arguments = parse()
    set_up(arguments.sides)
    load = os.getloadavg()[0]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.sides}
    for number, seed in enumerate(arguments.seeds):
        turned = arguments.sides[number % len(arguments.sides) :] + arguments.sides[: number % len(arguments.sides)]
        for name in turned:
            found = measure(name, arguments.core, replace(Workload(), seed=seed))
            results[name].append({"seed": seed} | found)
            print(f"seed {seed}, {name}: {as_text(found)}", flush=True)
    lines = as_markdown(arguments, results, load)
    print("\n" + "\n".join(lines))
    if arguments.save:
        path = FOLDER / "results" / f"{date.today().isoformat()}_time_to_solve"
        path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")
        print(f"\nsaved: {path.relative_to(REPOSITORY)}.json and .md")


def as_text(found: dict[str, Any]) -> str:
    solved = "solved" if found["episode_length"] >= LENGTH else "NOT solved"
    return (
        f"{solved} after {found['wall_s']:.1f} s, {found['iterations']} iterations, {found['env_steps']:,} env steps "
        f"(length {found['episode_length']:.0f}); first iteration done after {found['first_iteration_s']:.1f} s"
    )


def as_markdown(arguments: argparse.Namespace, results: dict[str, list[dict[str, Any]]], load: float) -> list[str]:
    versions = [own[0]["versions"] for own in results.values()]
    facts = facts_of_run("time_to_solve.py", versions, load, arguments.core)
    facts["seeds"] = ", ".join(map(str, arguments.seeds))
    lines = ["# Time to solve cartpole_classic on one core", "", "A cell reads: median over seeds (lowest .. highest);"]
    lines.append(f"a seed that has not solved it counts as long as it tried, {MAX_ITERATIONS} iterations.")
    lines += ["", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += [
        "| side | solved | s from the start of the process | of these until the first iteration is done | env steps |"
    ]
    lines += ["| --- | --- | --- | --- | --- |"]
    for name, own in results.items():
        solved = [each for each in own if each["episode_length"] >= LENGTH]
        cells = [name, f"{len(solved)} of {len(own)}"]
        for key, form in (("wall_s", ".1f"), ("first_iteration_s", ".1f"), ("env_steps", ",.0f")):
            cells.append(Spread.of([each[key] for each in own]).show(form))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def parse() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides = ("lockstep_jax", "lockstep", "brax", "rsl_rl")
    parser.add_argument("--sides", nargs="+", choices=tuple(CONTENDERS), default=list(sides))
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="number of the core all share")
    parser.add_argument("--save", action="store_true", help="write benchmarks/peers/results/<date>_time_to_solve.*")
    return parser.parse_args()


if __name__ == "__main__":
    main()
