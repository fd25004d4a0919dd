"""Training throughput of lockstep beside other libraries on one core, in one paired, interleaved run.

    .venv/bin/python benchmarks/peers/compare.py [--starts 3] [--rounds 5] [--save]
    .venv/bin/python benchmarks/peers/compare.py --sides lockstep_jax lockstep brax rsl_rl --save

Each side trains ``cartpole_classic`` in a process of its own, on the same core, in rounds that take turns, so that
what the host does meanwhile falls on all. A pair is one round of each, and the ratio is taken pair by pair. A round
is whole iterations (rollout and update); start-up and the first iterations are not counted. How fast a process is
depends on the memory it was given, so all sides are started anew ``--starts`` times. The command fails unless all
sides did equal work and all learned.

Each peer gets an environment of its own, ``benchmarks/peers/.venv/<peer>``, made the first time from
``requirements-<peer>.txt``.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict

from contenders import CONTENDERS, FOLDER, REPOSITORY, Worker, set_up
from report import Round, as_markdown, as_text, facts_of_run, ratios, table
from workload import Workload

PEERS = ("rsl_rl", "rsl_rl_compiled", "rl_games", "skrl", "skrl_compiled", "sb3", "sb3_compiled")
DEFAULT_SIDES = ("lockstep", *PEERS)
FLOPS_TOLERANCE = 0.1  # what is multiplied once more for the last values of a rollout differs
LEARNED = 450.0  # of 500 steps of an episode: so many, or twice as many as at first


def check_work(workers: Sequence[Worker], rounds: dict[str, list[Round]], workload: Workload) -> None:
    """End the command if a side did not do all of the work, or did not learn."""
    samples, steps = workload.samples_per_iteration, workload.steps_per_iteration
    first = workers[0].description["work"]
    expected = {"optimizer_steps": steps, "env_steps": samples, "parameters": first["parameters"]}
    for worker in workers:
        work, own = dict(worker.description["work"]), rounds[worker.name]
        gflops = work.pop("matrix_gflops")
        if work != expected:
            raise SystemExit(f"{worker.name} did {work} in an iteration, not {expected}")
        if abs(gflops / first["matrix_gflops"] - 1) > FLOPS_TOLERANCE:
            raise SystemExit(
                f"{worker.name} multiplies matrices for {gflops:.1f} GFLOP in an iteration, {workers[0].name} for "
                f"{first['matrix_gflops']:.1f}"
            )
        for each in own:
            if each["env_steps"] != each["num_iterations"] * samples:
                raise SystemExit(f"{worker.name} took {each['env_steps']} env steps in a round, not as many as asked")
            if each["optimizer_steps"] != each["num_iterations"] * steps:
                raise SystemExit(f"{worker.name} took {each['optimizer_steps']} optimizer steps, not as many as asked")
        before, after = worker.description["first_episode_length"], own[-1]["episode_length"]
        if after < min(2.0 * before, LEARNED):
            raise SystemExit(f"{worker.name} did not learn: episode length {before:.0f} before, {after:.0f} after")


def play_rounds(workers: Sequence[Worker], num_rounds: int, num_iterations: int) -> dict[str, list[Round]]:
    """Let the sides take turns; who begins alternates, so that a steady drift of the host favours nobody."""
    rounds: dict[str, list[Round]] = {worker.name: [] for worker in workers}
    for number in range(num_rounds):
        for worker in workers if number % 2 == 0 else reversed(workers):
            rounds[worker.name].append(worker.ask({"num_iterations": num_iterations}))
        newest = {name: own[-1]["env_steps"] / own[-1]["wall_s"] for name, own in rounds.items()}
        print(
            f"round {number + 1}/{num_rounds}: " + ", ".join(f"{k} {v:,.0f}/s" for k, v in newest.items()), flush=True
        )
    for worker in workers:
        rounds[worker.name][-1] |= worker.ask({})
    return rounds


def main() -> None:
    arguments = parse()
    workload = Workload(normalize_observations=not arguments.no_normalize_observations)
    set_up(arguments.sides)
    load = os.getloadavg()[0]
    starts: list[dict[str, list[Round]]] = []
    for number in range(arguments.starts):
        print(f"start {number + 1}/{arguments.starts}", flush=True)
        with ExitStack() as resources:
            workers = []
            for name in arguments.sides:
                worker = Worker(name, arguments.core, workload, warm_up=arguments.warm_up)
                workers.append(resources.enter_context(closing(worker)))
            starts.append(play_rounds(workers, arguments.rounds, arguments.iterations))
        check_work(workers, starts[-1], workload)
    facts = gather_facts(arguments, workers, workload, load) | medians_of_starts(starts)
    rounds = {name: [each for start in starts for each in start[name]] for name in arguments.sides}
    rows = table(rounds)
    print("\n" + "\n".join(f"{name}: {value}" for name, value in facts.items()) + "\n\n" + as_text(rows))
    if arguments.save:
        save(facts, rows, rounds)


def medians_of_starts(starts: Sequence[dict[str, list[Round]]]) -> dict[str, str]:
    """Return, for each side but the first, the median ratio to it in each start."""
    first, *others = starts[0]
    medians = {
        name: [statistics.median(ratios(start[first], start[name], "wall_s")) for start in starts] for name in others
    }
    return {
        f"{first} / {name}, median of each start": ", ".join(f"{median:.3f}" for median in own)
        for name, own in medians.items()
    }


def gather_facts(
    arguments: argparse.Namespace, workers: Sequence[Worker], workload: Workload, load: float
) -> dict[str, str]:
    """Return what the numbers depend on."""
    differing: dict[str, list[str]] = {}  # by what differs: the variants of a library differ in the same
    for name in arguments.sides:
        differing.setdefault(CONTENDERS[name].differs, []).append(name)
    differing.pop("", None)
    kept = [worker.name for worker in workers if worker.description["keep_large_buffers"]]
    versions = [worker.description["versions"] for worker in workers]
    facts = facts_of_run("compare.py", versions, load, arguments.core)
    return facts | {
        "workload": ", ".join(f"{name} {value}" for name, value in asdict(workload).items()),
        "different in that": "; ".join(f"{', '.join(names)}: {how}" for how, names in differing.items()) or "no side",
        "equal work": ", ".join(
            f"{name} {value}" for name, value in workers[0].description["work"].items() if name != "matrix_gflops"
        )
        + " in an iteration of every side",
        "products of matrices in an iteration, GFLOP": ", ".join(
            f"{worker.name} {worker.description['work']['matrix_gflops']:.1f}" for worker in workers
        ),
        "glibc keeps large buffers": ", ".join(kept) or "on no side",
        "rounds": f"{arguments.starts} starts of all processes x {arguments.rounds} rounds of {arguments.iterations} "
        "iterations per side, taking turns",
    }


def save(facts: dict[str, str], rows: list[list[str]], rounds: dict[str, list[Round]]) -> None:
    """Write the result beside this file."""
    first, *others = rounds
    pairs = {name: ratios(rounds[first], rounds[name], "wall_s") for name in others}
    folder = FOLDER / "results"
    folder.mkdir(exist_ok=True)
    is_default = list(rounds) == list(DEFAULT_SIDES)
    path = folder / (facts["date"] if is_default else f"{facts['date']}_{'_'.join(rounds)}")
    content = {"facts": facts, "rounds": rounds, f"{first}_over": pairs}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(as_markdown(rows, facts))
    print(f"\nsaved: {path.relative_to(REPOSITORY)}.json and .md")


def parse() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="of all processes")
    parser.add_argument("--rounds", type=int, default=5, help="per side and start")
    parser.add_argument("--iterations", type=int, default=5, help="per round")
    parser.add_argument("--warm_up", type=int, default=4, help="iterations that are not counted")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="number of the core all share")
    parser.add_argument("--sides", nargs="+", choices=tuple(CONTENDERS), default=list(DEFAULT_SIDES))
    parser.add_argument("--no_normalize_observations", action="store_true", help="on every side")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/peers/results/<date>[_<sides>].json and .md"
    )
    arguments = parser.parse_args()
    if arguments.core not in os.sched_getaffinity(0):
        parser.error(f"core {arguments.core} may not be used; allowed: {sorted(os.sched_getaffinity(0))}")
    for name in ("starts", "rounds", "iterations", "warm_up"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(arguments, name)}")
    return arguments


if __name__ == "__main__":
    main()
