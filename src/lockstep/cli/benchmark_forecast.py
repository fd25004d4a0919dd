"""``lockstep benchmark forecast``: what more ranks and nodes would give, from bundles of trainings."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import Arguments, Takes, asks_for_help, number, parse, switched_on
from lockstep.cli.usage import unknown_flag
from lockstep.core.errors import UsageError

if TYPE_CHECKING:
    from lockstep.benchmark.forecast.forecast import Forecast, Request
    from lockstep.benchmark.forecast.network import Network

HELP = """\
usage: lockstep benchmark forecast BUNDLE... [--nodes N] [--gpus_per_node M] [--bandwidth B --latency L]
                                   [--num_envs E] [--json]

Foretell how fast the training of the first BUNDLE would be on more ranks, where scaling stops, and by what. A model is
fitted to all bundles; its error is that on each of them, foretold from the others.

  BUNDLE...           bundles of lockstep benchmark training or training_multigpu, of one training (task, framework,
                      learner) on one kind of node, in 3 settings at least: numbers of ranks and of envs, sizes of
                      networks; several of one setting count as one. On CPU cores, one with more ranks than cores too
  --nodes N           of the largest job (default: 1)
  --gpus_per_node M   ranks on each node (default: as many as were measured at most); also --ranks_per_node
  --bandwidth B       of the network between nodes: 100Gb/s (bits) or 12.5GB/s (bytes)
  --latency L         of it, from one node to the next: 5us
  --num_envs E        of each rank (default: as in the first bundle)
  --json              print one JSON object and nothing else
"""

_FLAGS = {
    "nodes": Takes.ONE,
    "gpus_per_node": Takes.ONE,
    "ranks_per_node": Takes.ONE,
    "bandwidth": Takes.ONE,
    "latency": Takes.ONE,
    "num_envs": Takes.ONE,
    "json": Takes.SWITCH,
}
_MOST = 1_000_000


def main(argv: Sequence[str]) -> int:
    """Foretell, print, and return the exit code."""
    if asks_for_help(argv):
        print(HELP, end="")
        return 0
    arguments = parse(argv, _lookup)
    as_json = switched_on(arguments, "json")
    if not arguments.positionals:
        raise UsageError("a forecast needs bundles of trainings: lockstep benchmark forecast BUNDLE... --nodes N")
    request = _request(arguments)
    from lockstep.benchmark.bundle import read_bundle
    from lockstep.benchmark.forecast.forecast import forecast, to_json
    from lockstep.benchmark.forecast.words import error_in_words, model_in_words, warnings_of, words_of

    bundles = [(word, read_bundle(Path(word))) for word in arguments.positionals]
    result = forecast(bundles, request)
    words, warnings = words_of(result), warnings_of(result)
    if as_json:
        print(json.dumps(to_json(result, words, warnings)))
        return 0
    _print_table(result)
    print(f"\n{words}\n\nerror: {error_in_words(result)}")
    print("\n".join(model_in_words(result.model)))
    for warning in warnings:
        print(f"warning: {warning}")
    return 0


def _lookup(name: str) -> Takes:
    if name not in _FLAGS:
        raise unknown_flag(name, _FLAGS)
    return _FLAGS[name]


def _request(arguments: Arguments) -> Request:
    from lockstep.benchmark.forecast.forecast import Request

    flags = arguments.flags
    if "gpus_per_node" in flags and "ranks_per_node" in flags:
        raise UsageError("--gpus_per_node and --ranks_per_node are the same; keep one")
    here = flags.get("gpus_per_node") or flags.get("ranks_per_node")
    return Request(
        num_nodes=number("nodes", flags.get("nodes", ["1"]), 1, _MOST),
        ranks_per_node=None if here is None else number("gpus_per_node", here, 1, _MOST),
        num_envs=None if "num_envs" not in flags else number("num_envs", flags["num_envs"], 1, 2**31 - 1),
        network=_network(arguments),
    )


def _network(arguments: Arguments) -> Network | None:
    from lockstep.benchmark.forecast.network import Network, read_bandwidth, read_latency

    bandwidth, latency = arguments.last("bandwidth"), arguments.last("latency")
    if bandwidth is None and latency is None:
        return None
    if bandwidth is None or latency is None:
        given, missing = ("latency", "bandwidth 100Gb/s") if bandwidth is None else ("bandwidth", "latency 5us")
        raise UsageError(f"--{given} alone does not describe a network; give --{missing} too")
    return Network(read_latency(latency), read_bandwidth(bandwidth))


def _print_table(result: Forecast) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from lockstep.benchmark.units import duration, percent

    setting = result.rows[0].setting
    print(
        f"{setting.num_envs} envs per rank, {setting.work.num_steps_per_env} steps each per iteration, networks of "
        f"{setting.work.num_parameters:,} parameters\n"
    )
    terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    columns = ("ranks", "nodes", "env steps/s", "efficiency", "iteration", "computing", "busy cores", "stragglers")
    for column in (*columns, "latency", "bandwidth"):
        table.add_column(column, no_wrap=True, justify="right")
    for row in result.rows:
        part = row.prediction
        table.add_row(
            str(row.setting.num_ranks),
            str(row.setting.num_nodes),
            f"{row.steps_per_s:,.0f}",
            percent(row.efficiency),
            duration(part.iteration_s),
            duration(part.compute_s),
            duration(part.shared_memory_s + part.turns_s),
            duration(part.straggler_s + part.lagging_s),
            duration(part.latency_s),
            duration(part.bandwidth_s),
        )
    Console(markup=False, highlight=False, width=None if terminal else 500).print(table)
