"""Does a training survive whatever happens to its ranks, and does it learn what it would have learned undisturbed?

    .venv/bin/python -m benchmarks.soak [--kills 100] [--seed 0] [--num_ranks 2 3 4] [--save]

Trainings of several ranks on the CPU, each disturbed ``FAULTS_PER_RUN`` times: kill -9, SIGSTOP, SIGTERM, an exception
or a NaN, at a random instant, on a random rank. What must hold after each is in ``tests/multiproc/soak.py``. With
``--save`` the figures go to ``benchmarks/soak/<date>.json`` and ``.md``.
"""

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

from lockstep.core.environment import allowed_cores, git_of_lockstep
from tests.multiproc.soak import BOUND_S, KINDS, Account, Soak, draw

FAULTS_PER_RUN = 10
ITERATIONS_PER_FAULT = 22
FOLDER = Path(__file__).parent / "soak"
WAYS = ("restarted", "ended")


def soak(num_faults: int, seed: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Disturb trainings until there were so many faults; return an account of each."""
    randomness = random.Random(seed)
    accounts: list[dict[str, Any]] = []
    while len(accounts) < num_faults:
        num_ranks = ranks[len(accounts) // FAULTS_PER_RUN % len(ranks)]
        kinds = [KINDS[number % len(KINDS)] for number in range(min(FAULTS_PER_RUN, num_faults - len(accounts)))]
        randomness.shuffle(kinds)
        faults = [draw(randomness, kind, num_ranks) for kind in kinds]
        restarts = randomness.sample((100, 0), 2)
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            run = Soak(Path(folder) / "run", num_ranks, ITERATIONS_PER_FAULT * FAULTS_PER_RUN, restarts)
            numbers = count(len(accounts) + 1)

            def tell(account: Account, numbers: Iterator[int] = numbers) -> None:
                print(line(next(numbers), account), flush=True)

            done = run.run(faults, tell)
            accounts += [{"num_ranks": num_ranks, **asdict(account)} for account in done]
            print("\n".join(done[-1].wrong) or "the run learned what it would have learned undisturbed", flush=True)
    return accounts


def line(number: int, account: Account) -> str:
    """Return what is shown of a fault."""
    what = f"{number:3} {account.fault.kind} of rank {account.fault.rank}: {account.end} after {account.took_s:.1f} s"
    return "\n    ".join([what, *account.wrong])


def table(accounts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the figures by kind, as lines of Markdown."""
    names = ("misblamed", "unreadable", "other")
    late = f"later than {BOUND_S:.0f} s"
    head = ["fault", "times", "restarted", "resumed", "until the attempt ended: median, max", late, *names]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for kind in (*KINDS, "all"):
        own = [account for account in accounts if kind in (account["fault"]["kind"], "all")]
        if not own:
            continue
        times_s = [account["took_s"] for account in own]
        ways = [sum(account["end"] == way for account in own) for way in WAYS]
        wrong = [sum(len(account[name]) for account in own) for name in names]
        num_late = sum(time_s > BOUND_S for time_s in times_s)
        cells = [kind, len(own), *ways, f"{statistics.median(times_s):.1f} s, {max(times_s):.1f} s", num_late, *wrong]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def save(accounts: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Keep the accounts, and their figures."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{date.today().isoformat()}.json"
    kept = [
        {name: value for name, value in account.items() if name != "said" or wrong(account)} for account in accounts
    ]
    path.write_text(json.dumps({**about, "faults": kept}, indent=1) + "\n")
    intro = (
        f"{len(accounts)} faults at random instants on random ranks, seed {about['seed']}, {about['machine']}. An "
        f"attempt must end within {BOUND_S:.0f} s. Every run must end with the curve, the policy and the envs of one "
        "that was not disturbed (float64); if not, it counts under other."
    )
    text = "\n".join([f"# Soak of {about['date']}", "", intro, "", *table(accounts), ""])
    path.with_suffix(".md").write_text(text)
    print(f"saved {path} and .md")


def wrong(account: dict[str, Any]) -> bool:
    """Return whether anything went wrong."""
    return bool(account["misblamed"] or account["unreadable"] or account["other"] or account["took_s"] > BOUND_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_ranks", type=int, nargs="+", default=[2, 3, 4], help="of the trainings, in turn")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    began = time.time()
    accounts = soak(arguments.kills, arguments.seed, arguments.num_ranks)
    print("\n".join(table(accounts)))
    about = {
        "date": date.today().isoformat(),
        "seed": arguments.seed,
        "lockstep": git_of_lockstep(),
        "machine": f"{allowed_cores()} cores, {platform.system()} {platform.release()}",
        "load": os.getloadavg()[0],
        "hours": round((time.time() - began) / 3600, 2),
    }
    if arguments.save:
        save(accounts, about)
    raise SystemExit(any(wrong(account) for account in accounts))


if __name__ == "__main__":
    main()
