"""From what sides have done to what is written: facts and tables."""

import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from lockstep.core.environment import describe

Round = dict[str, Any]  # as worker.run_round gives it


@dataclass(frozen=True)
class Spread:
    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def show(self, form: str) -> str:
        return f"{self.median:{form}} ({self.lowest:{form}} .. {self.highest:{form}})"


def steps_per_s(rounds: list[Round], clock: str) -> list[float]:
    """Return the env steps per second of each round by its ``wall_s`` or ``cpu_s``."""
    return [each["env_steps"] / each[clock] for each in rounds]


def ratios(first: list[Round], other: list[Round], clock: str) -> list[float]:
    """Return how many times as fast ``first`` was, pair by pair."""
    pairs = zip(steps_per_s(first, clock), steps_per_s(other, clock), strict=True)
    return [own / peer for own, peer in pairs]


def table(rounds: dict[str, list[Round]]) -> list[list[str]]:
    """Return the rows of the table, its head first; every side is compared with the first one, pair by pair.

    A cell reads: median over rounds (lowest .. highest).
    """
    first_name, first = next(iter(rounds.items()))
    rows = [
        [
            "side",
            "env steps/s",
            "env steps per s of CPU time",
            f"{first_name} / side",
            f"{first_name} / side, CPU time",
            "episode length at the end",
        ]
    ]
    for name, own in rounds.items():
        compared = ["", ""]
        if own is not first:
            compared = [Spread.of(ratios(first, own, clock)).show(".3f") for clock in ("wall_s", "cpu_s")]
        speeds = [Spread.of(steps_per_s(own, clock)).show(",.0f") for clock in ("wall_s", "cpu_s")]
        rows.append([name, *speeds, *compared, f"{own[-1]['episode_length']:.0f}"])
    return rows


def facts_of_run(script: str, versions: Iterable[Mapping[str, str]], load: float, core: int) -> dict[str, str]:
    """Return what the numbers of any comparison depend on.

    Args:
        script: beside this file, which is running.
        versions: of what each side uses.
        load: of the host before it all began.
        core: number of the core that all sides share.
    """
    machine = describe()
    hardware, git = machine["hardware"], machine["git"]["lockstep"] or {"commit": "unknown", "dirty": False}
    named = {name: version for own in versions for name, version in own.items()}
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", f"benchmarks/peers/{script}", *sys.argv[1:]]),
        "versions": ", ".join(f"{name} {version}" for name, version in named.items()),
        "commit": git["commit"] + (" with changes" if git["dirty"] else ""),
        "CPU": f"{hardware['cpu']}, one core of {hardware['num_cores']} (number {core})",
        "load of the host": f"{load:.1f} before, {os.getloadavg()[0]:.1f} after",
    }


def as_text(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def as_markdown(rows: list[list[str]], facts: dict[str, str]) -> str:
    head, *body = rows
    lines = ["# Training throughput on one core", "", "A cell reads: median over rounds (lowest .. highest).", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join(lines) + "\n"
