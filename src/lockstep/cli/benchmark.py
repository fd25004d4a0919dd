"""``lockstep benchmark``: choose what is measured, in this process or in one per GPU, and show what came of it."""

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.cli.arguments import asks_for_help
from lockstep.core.errors import UsageError, nearest

if TYPE_CHECKING:
    from lockstep.benchmark.schema import Bundle, Kind

HELP = """\
usage: lockstep benchmark WHAT [ARGUMENTS]

Measure, on every rank, and write one bundle of results; then look into bundles.

  startup TASK      from nothing to the first iteration: phases, cold and warm kernel caches, the top functions
  runtime TASK      env steps per second with random actions
  training TASK     env steps per second of the learner's own loop
  startup_multigpu, runtime_multigpu, training_multigpu TASK --num_gpus N
                    the same with one process per GPU, on one node or several
  scaling TASK --num_gpus 1,2,4
                    train on more and more ranks, and say what is lost and why
  forecast BUNDLE... --nodes N --gpus_per_node M
                    what more nodes would give, from bundles of trainings
  compare A B       bundles side by side

of startup, runtime and training:
  --output FILE     the bundle (default: <log_root>/benchmark/<what>_<task>_<framework>_<ranks>_<time>.json); an older
                    file of that name is replaced
  --warm_up K       iterations that are not measured, at least 1 (default: 5)
  --iterations K    iterations that are (default: 30; an iteration of runtime has agent.num_steps_per_env steps)
  --repetitions K   of startup: warm starts after the cold one (default: 3)
  all flags of lockstep train, or of train_multigpu; but nothing is resumed, saved or logged

of training, in one process:
  --video                 film the policy afterwards
  --capture_env_sensors   keep what a few envs gave to the policy afterwards
  --check_success         evaluate the policy afterwards, and end with 1 if it has not learned
  --success_return R      what it is to reach (default: 0.8 of the most that an episode can give)

lockstep report BUNDLE... makes a page of bundles; docs/benchmarks.md says what is measured and how.
"""

_MEASURED_BY = {
    "startup": "lockstep.benchmark.startup.job:benchmark_startup",
    "runtime": "lockstep.benchmark.runtime.job:benchmark_runtime",
    "training": "lockstep.benchmark.training.job:benchmark_training",
}
"""Import strings of functions ``(config, options, prepare, finish)`` that all processes of a job call."""
_LAUNCHED_BY = "LOCKSTEP_BENCHMARK_COMMAND"
"""Variable with the launcher's command line, as JSON; its ranks are given other words."""
_KINDS = tuple(_MEASURED_BY)
_OTHERS = {name: f"lockstep.cli.benchmark_{name}" for name in ("scaling", "forecast", "compare")}
_ALL = (*_KINDS, *(f"{kind}_multigpu" for kind in _KINDS), *_OTHERS)


def main(argv: Sequence[str]) -> int:
    """Measure, or look at what was measured, and return the exit code."""
    what, *rest = argv or [""]
    name = what.replace("-", "_")
    if what in ("--help", "-h", "help") or (name in _ALL and name not in _OTHERS and asks_for_help(rest)):
        print(HELP, end="")
        return 0
    if name in _OTHERS:
        code: int = importlib.import_module(_OTHERS[name]).main(rest)
        return code
    kind, _, way = name.partition("_")
    if kind not in _KINDS or way not in ("", "multigpu"):
        raise _unknown(what, name)
    measure = _launch if way else _measure
    return measure(kind, rest)  # type: ignore[arg-type]  # it is one of the kinds


def _unknown(what: str, name: str) -> UsageError:
    known = ", ".join(_ALL)
    if not what:
        return UsageError(f"what is to be measured? Give one of {known} (lockstep benchmark --help)")
    if what.startswith("-"):
        return UsageError(f"what is measured comes first, as in lockstep benchmark training TASK, not {what!r}")
    return UsageError(f"unknown benchmark {what!r}{nearest(name, _ALL)} (there are {known})")


def _measure(kind: "Kind", argv: Sequence[str]) -> int:
    """Measure in this process, with all others of its job if it is a rank."""
    from lockstep.benchmark.output import check_place, default_path, keep
    from lockstep.cli.benchmark_request import read
    from lockstep.core.registry import load
    from lockstep.distributed.topology import from_environment
    from lockstep.session.framework import count_ranks

    config, options = read(kind, argv)
    num_ranks = count_ranks(config, from_environment().world_size)
    path = options.output or default_path(config, kind, num_ranks)
    options = replace(options, output=path, command=_command(kind, argv))

    def finish(bundle: "Bundle") -> None:
        keep(bundle, path, print)

    load(_MEASURED_BY[kind])(config, options, lambda: check_place(path), finish)
    return 0


def _command(kind: "Kind", argv: Sequence[str]) -> tuple[str, ...]:
    """Return the words of the command line by which this was asked for."""
    launched = os.environ.get(_LAUNCHED_BY)
    return tuple(json.loads(launched)) if launched else ("lockstep", "benchmark", kind, *argv)


def _launch(kind: "Kind", argv: Sequence[str]) -> int:
    """Launch ranks that measure."""
    from lockstep.cli.benchmark_request import launched
    from lockstep.cli.train_multigpu import start
    from lockstep.core.gpu_mask import find_gpus
    from lockstep.launch.plan import check_surroundings

    check_surroundings()
    os.environ[_LAUNCHED_BY] = json.dumps(["lockstep", "benchmark", f"{kind}_multigpu", *argv])
    gpus = find_gpus()
    options, work, dry_run = launched(kind, argv, gpus, os.environ)
    return start(options, work, gpus, dry_run)
