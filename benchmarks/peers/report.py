"""From the rounds of a comparison to its table."""

import statistics
from dataclasses import dataclass
from typing import Any

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
