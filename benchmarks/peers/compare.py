"""Training throughput of lockstep beside rsl_rl on one core, in one paired, interleaved run.

    .venv/bin/python benchmarks/peers/compare.py [--rounds 9] [--save]

Each side trains ``cartpole_classic`` in a process of its own, on the same core, in rounds that take turns, so that
what the host does meanwhile falls on both. A pair is one round of each, and the ratio is taken pair by pair. A round
is whole iterations (rollout and update); start-up and the first iterations are not counted. The command fails unless
all sides did equal work and all learned.

rsl_rl gets an environment of its own, ``benchmarks/peers/.venv``, made the first time from ``requirements.txt``.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from report import as_markdown, as_text, ratios, table
from workload import Workload

from lockstep.core.environment import describe

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]
REQUIREMENTS = FOLDER / "requirements.txt"
PEER_VENV = FOLDER / ".venv"


@dataclass(frozen=True)
class Contender:
    """A library, the env it trains in, and whether glibc was told to keep large buffers (as lockstep does)."""

    library: str
    env: str = "same"
    keep_large_buffers: bool = True


CONTENDERS = {
    "lockstep": Contender("lockstep"),
    "lockstep_default_malloc": Contender("lockstep", keep_large_buffers=False),
    "rsl_rl": Contender("rsl_rl", env="lean"),
    "rsl_rl_same_env": Contender("rsl_rl"),
    "rsl_rl_default_malloc": Contender("rsl_rl", env="lean", keep_large_buffers=False),
}


class Worker:
    """A contender's process, which works only while it is asked."""

    def __init__(self, name: str, python: Path, core: int, warm_up: int, workload: Workload) -> None:
        self.name = name
        one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
        self._process = subprocess.Popen(
            [python, FOLDER / "worker.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | one_thread,
        )
        preparation = {"core": core, "warm_up": warm_up, "workload": asdict(workload)}
        self.description = self.ask(asdict(CONTENDERS[name]) | preparation)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request, wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}; its last words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def peer_python() -> Path:
    """Return the interpreter of the peer's environment, which is made if it is missing or older than its list."""
    python, stamp = PEER_VENV / "bin" / "python", PEER_VENV / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < REQUIREMENTS.stat().st_mtime:
        print(f"setting up {PEER_VENV.relative_to(REPOSITORY)}; this happens once", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", PEER_VENV], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--requirement", REQUIREMENTS], check=True)
        subprocess.run([*install, "--no-deps", "--editable", REPOSITORY], check=True)
        stamp.touch()
    return python


def check_work(workers: Sequence[Worker], rounds: dict[str, list[dict[str, Any]]], workload: Workload) -> None:
    """End the command if a side did not do all of the work, or did not learn."""
    for worker in workers:
        work = worker.description["work"]
        samples = workload.samples_per_iteration
        trained = samples * workload.num_learning_epochs
        expected = {"trained_rows": {"actor": trained, "critic": trained}, "env_steps": samples}
        expected |= {"optimizer_steps": workload.steps_per_iteration, "parameters": workers[0].description["work"]["parameters"]}
        if work != expected:
            raise SystemExit(f"{worker.name} did {work} in an iteration, not {expected}")
        for each in rounds[worker.name]:
            if each["optimizer_steps"] * samples != each["env_steps"] * workload.steps_per_iteration:
                raise SystemExit(f"{worker.name} did not do all of a round's work: {each}")
        before, after = worker.description["first_mean_episode_length"], rounds[worker.name][-1]["mean_episode_length"]
        if after < 2.0 * before:
            raise SystemExit(f"{worker.name} did not learn: mean episode length {before:.0f} before, {after:.0f} after")


def play_rounds(workers: Sequence[Worker], num_rounds: int, num_iterations: int) -> dict[str, list[dict[str, Any]]]:
    """Let the sides take turns; who begins alternates, so that a steady drift of the host favours nobody."""
    rounds: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for number in range(num_rounds):
        for worker in workers if number % 2 == 0 else reversed(workers):
            rounds[worker.name].append(worker.ask({"num_iterations": num_iterations}))
        newest = {name: own[-1]["env_steps"] / own[-1]["wall_s"] for name, own in rounds.items()}
        print(f"round {number + 1}/{num_rounds}: " + ", ".join(f"{k} {v:,.0f}/s" for k, v in newest.items()), flush=True)
    return rounds


def main() -> None:
    arguments = parse()
    workload = Workload(normalize_observations=not arguments.no_normalize_observations)
    python = peer_python()
    hardware = describe()
    load_before = os.getloadavg()[0]
    with ExitStack() as resources:
        workers = []
        for name in arguments.sides:
            interpreter = python if CONTENDERS[name].library == "rsl_rl" else Path(sys.executable)
            worker = Worker(name, interpreter, arguments.core, arguments.warm_up, workload)
            workers.append(resources.enter_context(closing(worker)))
        rounds = play_rounds(workers, arguments.rounds, arguments.iterations)
    check_work(workers, rounds, workload)
    versions: dict[str, str] = {}
    for worker in workers:
        versions |= worker.description["versions"]
    facts = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/peers/compare.py", *sys.argv[1:]]),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "lockstep's commit": str(hardware["git"]["lockstep"]),
        "CPU": f"{hardware['hardware']['cpu']}, one core (number {arguments.core}), load before {load_before:.1f}",
        "workload": ", ".join(f"{name} {value}" for name, value in asdict(workload).items()),
        "equal work": f"{workers[0].description['work']} per iteration on every side",
        "rounds": f"{arguments.rounds} of {arguments.iterations} iterations per side, taking turns",
    }
    rows = table(rounds)
    print("\n" + "\n".join(f"{name}: {value}" for name, value in facts.items()) + "\n\n" + as_text(rows))
    if arguments.save:
        save(facts, rows, rounds)


def save(facts: dict[str, str], rows: list[list[str]], rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Write the result beside this file."""
    first, *others = rounds
    pairs = {name: ratios(rounds[first], rounds[name], "wall_s") for name in others}
    folder = FOLDER / "results"
    folder.mkdir(exist_ok=True)
    path = folder / facts["date"]
    content = {"facts": facts, "rounds": rounds, f"{first}_over": pairs}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(as_markdown(rows, facts))
    print(f"\nsaved: {path.relative_to(REPOSITORY)}.json and .md")


def parse() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="per side")
    parser.add_argument("--iterations", type=int, default=10, help="per round")
    parser.add_argument("--warm_up", type=int, default=4, help="iterations that are not counted")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="number of the core all share")
    parser.add_argument("--sides", nargs="+", choices=tuple(CONTENDERS), default=["lockstep", "rsl_rl"])
    parser.add_argument("--no_normalize_observations", action="store_true", help="on every side")
    parser.add_argument("--save", action="store_true", help="write benchmarks/peers/results/<date>.json and .md")
    arguments = parser.parse_args()
    if arguments.core not in os.sched_getaffinity(0):
        parser.error(f"core {arguments.core} may not be used; allowed: {sorted(os.sched_getaffinity(0))}")
    for name in ("rounds", "iterations", "warm_up"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(arguments, name)}")
    return arguments


if __name__ == "__main__":
    main()
