"""From the words after ``lockstep benchmark training`` to the training that is measured, and how."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.benchmark.options import ITERATIONS, REPETITIONS, WARM_UP, Options, check_options
from lockstep.cli.arguments import Arguments, Takes, flag_name, number, parse, path_of, switched_on, take_out
from lockstep.cli.launch_request import LAUNCH_FLAGS, PLACE_FLAGS, options_of, split, work_of
from lockstep.cli.train_request import flag_names
from lockstep.cli.train_request import read as read_training
from lockstep.cli.usage import MULTIGPU_HABITS, TRAIN_HABITS, unknown_flag
from lockstep.core.config import show
from lockstep.core.errors import UsageError
from lockstep.core.gpu_mask import Gpu
from lockstep.distributed import topology
from lockstep.launch.plan import Options as LaunchOptions
from lockstep.launch.plan import Work

if TYPE_CHECKING:
    from lockstep.benchmark.schema import Kind
    from lockstep.learn.config import TrainConfig

OWN_FLAGS = {
    "output": Takes.ONE,
    "warm_up": Takes.ONE,
    "iterations": Takes.ONE,
    "repetitions": Takes.ONE,
    "video": Takes.SWITCH,
    "capture_env_sensors": Takes.SWITCH,
    "check_success": Takes.SWITCH,
    "success_return": Takes.ONE,
}
"""The benchmark's own flags; all others are those of a training."""

_NEVER = {
    "resume": "a benchmark starts anew and goes on with no run; leave it out",
    "checkpoint": "a benchmark starts anew, from no weights; leave it out",
    "script": "a benchmark measures what lockstep trains; for a script of your own use train_multigpu --script",
    "max_restarts": "a benchmark that has failed has measured nothing; leave it out",
    "max_iterations": "the measured iterations are --iterations K, those before them --warm_up K",
}


def read(kind: "Kind", argv: Sequence[str]) -> tuple["TrainConfig", Options]:
    """Return what a process of a benchmark does.

    Raises:
        UsageError: whatever is wrong with it.
    """
    own, rest = _taken_apart(argv)
    for word in rest:
        if flag_name(word) in PLACE_FLAGS:
            raise UsageError(
                f"{word.partition('=')[0]} says where ranks run, and lockstep benchmark {kind} measures one process; "
                f"use lockstep benchmark {kind}_multigpu"
            )
    options = options_in(kind, own)
    check_options(options, topology.from_environment().world_size)
    return read_training(rest).config, options


def launched(
    kind: "Kind", argv: Sequence[str], gpus: Sequence[Gpu], environment: Mapping[str, str]
) -> tuple[LaunchOptions, Work, bool]:
    """Return the options of a launch, what each of its ranks runs, and whether it is only to be shown.

    Raises:
        UsageError: whatever is wrong with it.
    """
    own, rest = _taken_apart(argv)
    options = options_in(kind, own)
    check_options(options, num_processes=0)  # of a launch, even of one process
    words = split(rest)
    launch = options_of(words.own)
    work = work_of(words, launch, gpus, environment, ("benchmark", kind, *_words(own)))
    return launch, work, switched_on(words.own, "dry_run")


def options_in(kind: "Kind", own: Arguments) -> Options:
    """Return how a benchmark is done.

    Raises:
        UsageError: a flag that belongs to another kind, or a value that can't be.
    """
    for name, belongs in (("repetitions", "startup"), ("success_return", "training")):
        if name in own.flags and kind != belongs:
            raise UsageError(f"--{name} belongs to lockstep benchmark {belongs}; leave it out")
    for name in ("warm_up", "iterations"):
        if name in own.flags and kind == "startup":
            raise UsageError(f"--{name} belongs to runtime and training; startup ends with the first iteration")
    if "success_return" in own.flags and not switched_on(own, "check_success"):
        raise UsageError("--success_return says what --check_success asks for; give both")
    return Options(
        kind=kind,
        output=path_of(own, "output"),
        warm_up=number("warm_up", own.flags.get("warm_up", [str(WARM_UP)]), 1),
        iterations=number("iterations", own.flags.get("iterations", [str(ITERATIONS)]), 1),
        repetitions=number("repetitions", own.flags.get("repetitions", [str(REPETITIONS)]), 0, 100),
        video=switched_on(own, "video"),
        capture_env_sensors=switched_on(own, "capture_env_sensors"),
        check_success=switched_on(own, "check_success"),
        success_return=_return(own.last("success_return")),
    )


def _return(text: str | None) -> float | None:
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise UsageError(f"success_return must be a number, not {show(text)}")
    return value


def _taken_apart(argv: Sequence[str]) -> tuple[Arguments, list[str]]:
    own, rest, _ = take_out(argv, OWN_FLAGS, final="")
    known = [*OWN_FLAGS, *LAUNCH_FLAGS, *flag_names()]
    for word in rest:
        name = flag_name(word)
        if name in _NEVER:
            raise UsageError(f"{word.partition('=')[0]}: {_NEVER[name]}")
        # A name with a dot may be a setting of the task's, which is not known yet.
        if name is not None and name not in known and "." not in name:
            raise unknown_flag(name, known, {**TRAIN_HABITS, **MULTIGPU_HABITS})
    return parse(own, OWN_FLAGS.__getitem__), rest


def _words(own: Arguments) -> list[str]:
    """Return the benchmark's own flags as a rank is given them."""
    return [f"--{name}={values[-1]}" if values else f"--{name}" for name, values in own.flags.items()]
