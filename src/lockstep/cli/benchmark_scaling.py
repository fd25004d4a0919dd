"""``lockstep benchmark scaling``: the same training on more and more ranks, what is lost on the way, and why."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import Arguments, Takes, asks_for_help, flag_name, number, parse, switched_on, take_out
from lockstep.cli.arguments import path_of as path_in
from lockstep.core.config import show
from lockstep.core.errors import RunError, UsageError

if TYPE_CHECKING:
    from lockstep.benchmark.scaling.result import ScalingResult
    from lockstep.benchmark.scaling.sweep import Sweep
    from lockstep.learn.config import TrainConfig

HELP = """\
usage: lockstep benchmark scaling TASK --num_gpus N,N[,N...] [--strong --total_envs T] [--rounds R] [--output DIR]
                                  [FLAGS OF LOCKSTEP BENCHMARK TRAINING_MULTIGPU]

Train on each number of GPUs, one job after another; say how near throughput comes to growing with the ranks, where the
rest goes (computing, waiting for later ranks, communication, cores that others have), and why.

  --num_gpus 1,2,4   ranks of the jobs; with --device cpu they run on CPU cores
  --num_envs N       envs of every rank, the same for all jobs
  --strong           share out as many envs in every job instead: needs --total_envs T
  --rounds R         how often each number is measured, in turn (default: 3; an interval needs 2)
  --warm_up K        iterations of each job that are not measured (default: 5)
  --iterations K     iterations that are (default: 30)
  --output DIR       gets scaling.json, scaling.png and the bundle of every job
                     (default: <log_root>/benchmark/scaling_<task>_<time>)

On several nodes run lockstep benchmark training_multigpu on each number of nodes; then compare or forecast.
"""

ROUNDS = 3
_MAX_ROUNDS = 1000
_MAX_RANKS = 1024
_OWN_FLAGS = {
    "num_gpus": Takes.ONE,
    "nproc_per_node": Takes.ONE,
    "strong": Takes.SWITCH,
    "rounds": Takes.ONE,
    "output": Takes.ONE,
}
_NODES = (
    "a sweep stays on one node; on several run lockstep benchmark training_multigpu with each number of nodes, then "
    "lockstep benchmark compare or forecast with the bundles"
)
_NEVER = {
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
        _NODES,
    ),
    **dict.fromkeys(("local_addr", "coordinator_address"), _NODES),
    **dict.fromkeys(("weak", "weak_scaling"), "equal envs on every rank are the default; leave it out"),
    **dict.fromkeys(("strong_scaling",), "equal envs in every job are --strong --total_envs T"),
    **dict.fromkeys(("repetitions", "repeats", "num_rounds", "trials"), "how often it is measured is --rounds R"),
    **dict.fromkeys(("gpus", "counts", "ranks", "world_size"), "the numbers of ranks are --num_gpus 1,2,4"),
    "dry_run": "lockstep benchmark training_multigpu --num_gpus N --dry_run shows what a job would do",
}


def main(argv: Sequence[str]) -> int:
    """Run the sweep, show what came of it, and return the exit code.

    Args:
        argv: the words after ``scaling``.
    """
    if asks_for_help(argv):
        print(HELP, end="")
        return 0
    from lockstep.launch.plan import check_surroundings

    check_surroundings()
    sweep, words, output = read(argv)
    config, warnings = check_jobs(sweep, words, os.environ)
    folder = output or _default_folder(config)
    _make(folder)
    for line in warnings:
        _say(f"lockstep: warning: {line}")
    threads = equal_threads(config, max(sweep.counts))
    if threads:
        _say(f"every rank of every job has the threads of one of {max(sweep.counts)}: {' '.join(threads)}")
    from lockstep.benchmark.scaling.jobs import ProcessJobs
    from lockstep.benchmark.scaling.sweep import run_sweep

    keep = _keeper(folder)
    result = run_sweep(sweep, ProcessJobs([*words, *threads]).run, folder, _say, keep)
    _show(result)
    _say(f"written: {folder}: scaling.json, scaling.png and the bundle of every job")
    return 0


def read(argv: Sequence[str]) -> tuple["Sweep", list[str], Path | None]:
    """Return the sweep that a command line asks for, the words of each job, and the folder if one is named.

    Raises:
        UsageError: a flag that a sweep does not have, or a value that can't be.
    """
    from lockstep.benchmark.scaling.sweep import Sweep

    taken, words, _ = take_out(argv, _OWN_FLAGS, final="")
    for word in words:
        name = flag_name(word)
        if name in _NEVER:
            raise UsageError(f"{word.partition('=')[0]}: {_NEVER[name]}")
    own = parse(taken, _OWN_FLAGS.__getitem__)
    is_strong = switched_on(own, "strong")
    _check_envs(words, is_strong)
    sweep = Sweep(
        counts=_counts(own),
        rounds=number("rounds", own.flags.get("rounds", [str(ROUNDS)]), 1, _MAX_ROUNDS),
        is_strong=is_strong,
        command=tuple(sys.argv),
    )
    return sweep, words, path_in(own, "output")


def check_jobs(
    sweep: "Sweep", words: Sequence[str], environment: Mapping[str, str]
) -> tuple["TrainConfig", tuple[str, ...]]:
    """Check every job as its launcher would, before the first begins; return the config, and what may not be meant.

    Raises:
        UsageError: whatever is wrong with one of them.
    """
    from lockstep.cli.benchmark_request import OWN_FLAGS, launched
    from lockstep.cli.launch_request import split
    from lockstep.cli.train_request import read as read_training
    from lockstep.core.gpu_mask import find_gpus
    from lockstep.launch.plan import make_plan

    gpus = find_gpus()
    configs, warnings = [], dict[str, None]()
    _, of_training, _ = take_out(words, OWN_FLAGS, final="")
    for count in sweep.counts:
        launch, work, _ = launched("training", [*words, "--num_gpus", str(count)], gpus, environment)
        warnings.update(dict.fromkeys(make_plan(launch, work, gpus, environment).warnings))
        configs.append(read_training(split(of_training).train, count).config)
    for config in configs:
        if not sweep.is_strong and config.num_envs != configs[0].num_envs:
            raise UsageError(
                f"num_envs is {configs[0].num_envs} with --num_gpus {sweep.counts[0]} and {config.num_envs} with a "
                "larger number; give every rank as many: --num_envs N"
            )
    return configs[0], tuple(warnings)


def equal_threads(config: "TrainConfig", most: int) -> list[str]:
    """Return the words that give a rank of every job as many threads as one of the largest has.

    By itself a rank takes its share of the node's cores: the only rank of a job would compute on all of them, and no
    number of ranks could be faster. On GPUs, and with JAX, which takes no such number, nothing is said.

    Args:
        config: of the training.
        most: ranks of the largest job.
    """
    from lockstep.core.environment import allowed_cores
    from lockstep.session.process import torch_threads

    if config.ml_framework != "torch" or config.device != "cpu":
        return []
    cores = max(1, allowed_cores() // most)
    words = [] if config.num_torch_threads else ["--num_torch_threads", str(torch_threads(config, cores))]
    if config.env.num_physics_threads or not config.env.takes_physics_threads:
        return words
    return [*words, "--env.num_physics_threads", str(cores)]


def _counts(own: Arguments) -> tuple[int, ...]:
    if "num_gpus" in own.flags and "nproc_per_node" in own.flags:
        raise UsageError("--num_gpus and --nproc_per_node are the same; keep one")
    text = own.last("num_gpus") or own.last("nproc_per_node")
    if text is None:
        raise UsageError("a sweep needs its numbers of ranks: give --num_gpus 1,2,4")
    counts = [number("num_gpus", [part], 1, _MAX_RANKS) for part in text.strip("[]()").split(",")]
    if len(counts) < 2:
        raise UsageError(
            f"--num_gpus {text} is one number of ranks, and a sweep compares two or more, as in --num_gpus 1,2,4; one "
            "is measured by lockstep benchmark training_multigpu"
        )
    if len(set(counts)) < len(counts):
        raise UsageError(f"--num_gpus {text} names a number twice; for more measurements of each use --rounds R")
    return tuple(sorted(counts))


def _check_envs(words: Sequence[str], is_strong: bool) -> None:
    """Refuse numbers of envs that would make the jobs of a sweep incomparable."""
    given = dict[str, str]()
    for index, word in enumerate(words):
        name, equals, value = (flag_name(word), *word.partition("=")[1:])
        if name in ("num_envs", "total_envs"):
            given[name] = value if equals else "".join(words[index + 1 : index + 2])
    if is_strong:
        if "num_envs" in given:
            raise UsageError(
                "--strong shares out as many envs in every job: give --total_envs T and leave --num_envs out"
            )
        if "total_envs" not in given:
            raise UsageError("--strong needs the envs of the whole job: add --total_envs T")
        return
    if "total_envs" in given:
        raise UsageError(
            "--total_envs gives each rank fewer envs the more ranks there are; give --num_envs N for every rank, or "
            "add --strong to measure just that"
        )
    if "," in given.get("num_envs", ""):
        raise UsageError(
            f"--num_envs {show(given['num_envs'])} differs by rank, and a sweep compares equal numbers on every rank; "
            "give one number, or --strong --total_envs T"
        )


def _default_folder(config: "TrainConfig") -> Path:
    name = f"scaling_{config.task.replace('/', '_')}_{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
    return Path(config.log_root) / "benchmark" / name


def _make(folder: Path) -> None:
    from lockstep.core.files import explain, require_place

    require_place("output", folder.absolute())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if next(folder.iterdir(), None) is not None:
            raise UsageError(f"output {folder} is not empty; a sweep needs a folder of its own, so choose another")
    except OSError as error:
        raise RunError(explain(error, folder)) from error


def _keeper(folder: Path) -> "Callable[[ScalingResult], None]":
    from lockstep.benchmark.scaling.picture import draw_scaling
    from lockstep.benchmark.scaling.result import write_scaling

    def keep(result: "ScalingResult") -> None:
        write_scaling(result, folder / "scaling.json")
        draw_scaling(result, folder / "scaling.png")

    return keep


def _show(result: "ScalingResult") -> None:
    from rich.console import Console

    from lockstep.benchmark.scaling.screen import render

    is_terminal = sys.stdout.isatty()
    # A pipe or file has no width: let lines be as long as they are.
    console = Console(markup=False, highlight=False, width=None if is_terminal else 2000)
    console.print(render(result, is_terminal))


def _say(line: str) -> None:
    print(line, flush=True)
