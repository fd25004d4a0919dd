"""``lockstep slurm``: write the script of a job, hand it in, and tell how it is getting on."""

import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import Arguments, Takes, asks_for_help, flag_name, number, parse, path_of, switched_on
from lockstep.cli.usage import SLURM_HABITS, SLURM_HELP, unknown_flag
from lockstep.core.config import show
from lockstep.core.errors import RunError, UsageError, nearest
from lockstep.core.files import exists, explain, write_atomic
from lockstep.launch import slurm_commands
from lockstep.launch.slurm import STOP_BEFORE_S, Job, Options, Payload, Surroundings, make_job
from lockstep.launch.slurm_script import script_of

if TYPE_CHECKING:
    from lockstep.cli.launch_request import Words
    from lockstep.learn.config import TrainConfig

_TEXTS = ("gpu_type", "mem", "partition", "time", "account", "job_name")
_REPEATABLE = ("setup", "sbatch")
_FLAGS = {
    "nodes": Takes.ONE,
    "gpus_per_node": Takes.ONE,
    "ranks_per_node": Takes.ONE,
    "cpus_per_task": Takes.ONE,
    "stop_before": Takes.ONE,
    **dict.fromkeys((*_TEXTS, *_REPEATABLE, "output_dir", "assets_dir", "script"), Takes.ONE),
    "submit": Takes.SWITCH,
}
_MAX_NODES, _MAX_RANKS_PER_NODE = 65536, 1024


def main(argv: Sequence[str]) -> int:
    """Write a job script, and submit it if that is asked for, or show a run's job; return the exit code."""
    own, work = _parted(argv)
    if asks_for_help(own):
        print(SLURM_HELP, end="")
        return 0
    if own[:1] == ["status"]:
        from lockstep.cli.slurm_status import show_status

        return show_status(own[1:])
    arguments = parse(_with_values_attached(own), _lookup, _REPEATABLE)
    for word in arguments.positionals:
        raise _out_of_place(word)
    options, submits = _options(arguments), switched_on(arguments, "submit")
    payload, warnings = _payload(work, options)
    job = make_job(options, payload, _surroundings(argv))
    _check_syntax(job)
    if submits:
        slurm_commands.check_sbatch()
    _write(job)
    for warning in warnings:
        print(f"lockstep: warning: {warning}", file=sys.stderr)
    if not submits:
        name = str(job.path)
        path = shlex.quote(f"./{name}" if name.startswith("-") else name)
        print(f"{job.path} is written; sbatch {path} submits it (or --submit)")
        return 0
    job_id = slurm_commands.submit(job.path, job.surroundings.folder)
    stdout, stderr = job.output(job_id)
    print(f"job {job_id} is submitted ({job.path}); it prints to {stdout} and {stderr}")
    return 0


def _parted(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return what stands before and after ``--``; None if there is none."""
    words = list(argv)
    if "--" not in words:
        return words, None
    index = words.index("--")
    return words[:index], words[index + 1 :]


def _with_values_attached(words: Sequence[str]) -> list[str]:
    """Return words in which ``--sbatch --qos=high`` is one: its value looks like a flag, but is none of ours."""
    result: list[str] = []
    for word in words:
        previous = result[-1] if result else ""
        is_ours = flag_name(word) in _FLAGS
        if previous == "--sbatch" and is_ours and word.startswith("--"):
            raise UsageError(f"--sbatch needs a value; if {word} is to be one, write --sbatch={shlex.quote(word)}")
        if "=" not in previous and flag_name(previous) in _REPEATABLE and not is_ours:
            result[-1] = f"{previous}={word}"
        else:
            result.append(word)
    return result


def _lookup(name: str) -> Takes:
    if name not in _FLAGS:
        raise unknown_flag(name, _FLAGS, SLURM_HABITS)
    return _FLAGS[name]


def _out_of_place(word: str) -> UsageError:
    if word in ("train", "train_multigpu") or word.endswith(".py"):
        return UsageError(
            f"{word!r} is what the job runs: write -- before it, as in lockstep slurm --nodes 2 -- {word}"
        )
    mend = nearest(word, ["status"])
    return UsageError(f"unexpected {show(word)}{mend or '; what the job runs stands after --'}")


def _options(arguments: Arguments) -> Options:
    def count(name: str, maximum: int) -> int | None:
        return number(name, arguments.flags[name], 1, maximum) if name in arguments.flags else None

    if arguments.last("gpus_per_node") == "0":
        raise UsageError("gpus_per_node is 0; for ranks on CPU cores write --ranks_per_node N instead")
    gpus = count("gpus_per_node", _MAX_RANKS_PER_NODE)
    ranks = count("ranks_per_node", _MAX_RANKS_PER_NODE)
    return Options(
        num_nodes=count("nodes", _MAX_NODES) or 1,
        gpus_per_node=1 if gpus is None and ranks is None else gpus,
        ranks_per_node=ranks,
        cpus_per_task=count("cpus_per_task", _MAX_NODES),
        stop_before_s=count("stop_before", 2**31) or STOP_BEFORE_S,
        setup=tuple(arguments.flags.get("setup", [])),
        sbatch=tuple(arguments.flags.get("sbatch", [])),
        output_dir=path_of(arguments, "output_dir") or Path("slurm"),
        assets_dir=path_of(arguments, "assets_dir"),
        script=path_of(arguments, "script"),
        **{name: arguments.last(name) for name in _TEXTS},
    )


def _payload(work: Sequence[str] | None, options: Options) -> tuple[Payload, tuple[str, ...]]:
    """Return what the launchers are to run, checked as they would, and what may not be meant."""
    if not work:
        raise UsageError(
            "what is the job to run? It stands after --: lockstep slurm --nodes 2 -- train TASK, or -- my_train.py"
        )
    first, *rest = work
    command = first.replace("-", "_")
    if command not in ("train", "train_multigpu") and not first.endswith(".py"):
        raise _no_work(first)
    words = rest if not first.endswith(".py") else ["--script", *work]
    return _checked(words, options)


def _no_work(first: str) -> UsageError:
    if first in ("lockstep", "python", "python3", "torchrun", "srun", "uv"):
        return UsageError(f"leave {first!r} out: after -- comes train TASK, or the path of a Python script")
    mend = nearest(first, ("train", "train_multigpu"))
    return UsageError(f"a job can run train, or a Python script (my_train.py), not {first!r}{mend}")


def _checked(words: list[str], options: Options) -> tuple[Payload, tuple[str, ...]]:
    from lockstep.cli import launch_request
    from lockstep.cli.train_request import read
    from lockstep.launch.plan import make_plan
    from lockstep.launch.rendezvous import Nodes

    parts = launch_request.split(words)
    _check_words(parts)
    # Node 1 of several: as node 0 it would look whether the port is free here, where no rank will run.
    several = {"nnodes": str(options.num_nodes), "node_rank": "1", "master_addr": "127.0.0.1", "master_port": "10000"}
    num_ranks = options.ranks_per_node or options.gpus_per_node or 1
    nodes = Nodes(**several) if options.num_nodes > 1 else Nodes()
    launcher = replace(launch_request.options_of(parts.own), num_gpus=num_ranks, nodes=nodes)
    work = launch_request.work_of(parts, launcher, [], os.environ)
    _check_device(work.device, options, parts)
    make_plan(launcher, replace(work, device="cpu"), [])  # for what else it refuses; GPUs are elsewhere
    device = ["--device", "cpu"] if options.ranks_per_node is not None and work.device != "cpu" else []
    if work.is_script:
        script = str(parts.own.last("script"))
        return Payload(Path(script).stem, (*device, *words), is_script=True), work.warnings
    resume = [] if "resume" in _flags_of(parts.train) else ["--resume", "auto"]
    config = read((*parts.train, *resume), num_ranks * options.num_nodes).config
    warnings = (*work.warnings, *_warnings_of_cores(options, config))
    return Payload(config.task, (*words, *device, *resume)), warnings


def _warnings_of_cores(options: Options, config: "TrainConfig") -> Iterator[str]:
    """Yield a warning of too few CPU cores for a training."""
    from lockstep.recipes.catalog import engines_of

    has_gpus = options.gpus_per_node is not None
    usual = engines_of(config.task, config.ml_framework, has_gpus)[0]
    needs = [
        *(["MuJoCo's physics are computed on CPU cores"] if "mujoco" in (config.engine, usual) else []),
        *([] if has_gpus else ["its ranks are on CPU cores"]),
    ]
    num_ranks, cores = options.ranks_per_node or options.gpus_per_node or 1, options.cpus_per_task
    if cores is None and needs:
        yield (
            f"without --cpus_per_task C many clusters give each node of a job a single core, and {needs[0]}; give it "
            f"{num_ranks} or more"
        )
    elif cores is not None and cores < num_ranks:
        yield (
            f"{num_ranks} ranks of each node share {cores} core{'s' if cores > 1 else ''} (--cpus_per_task); they will "
            "wait for one another"
        )


def _check_words(parts: "Words") -> None:
    """Refuse what is right for a launcher, but not for one that a job script starts, perhaps many times."""
    from lockstep.cli.launch_request import PLACE_FLAGS

    for name in parts.own.flags:
        if name in PLACE_FLAGS:
            raise UsageError(f"--{name} is the job script's to say; use --nodes, --gpus_per_node or --ranks_per_node")
    if "dry_run" in parts.own.flags:
        raise UsageError("--dry_run has no place in a job, which makes one before it starts; leave it out")
    if "resume" in _flags_of(parts.train) and not _value_after("resume", parts.train):
        raise UsageError(
            "--resume without a directory would go on with whichever run is the newest when the job starts; write "
            "--resume RUN_DIR, or leave it out"
        )


def _check_device(device: str, options: Options, parts: "Words") -> None:
    if device == "cpu" and options.gpus_per_node is not None:
        flags = _flags_of(parts.train)
        if "resume" in flags and "device" not in flags and _value_after("resume", parts.train) != "auto":
            raise UsageError("the run to go on with has device cpu: give --ranks_per_node N instead of --gpus_per_node")
        raise UsageError("--device cpu needs no GPUs: give --ranks_per_node N instead of --gpus_per_node")
    if device != "auto" and device != "cpu" and options.ranks_per_node is not None:
        raise UsageError(f"--ranks_per_node is for ranks on CPU cores, not for device {device!r}; give --gpus_per_node")
    if device.startswith("cuda:"):
        raise UsageError(f"device {device!r} is one GPU, and SLURM chooses them; leave --device out")


def _flags_of(words: Sequence[str]) -> list[str]:
    return [name for word in words if (name := flag_name(word)) is not None]


def _value_after(name: str, words: Sequence[str]) -> str:
    """Return the word given to a flag, or nothing."""
    from lockstep.recipes.catalog import TASKS

    lookup = {name: Takes.OPTIONAL}
    arguments = parse(words, lambda flag: lookup.get(flag, Takes.UNKNOWN), _flags_of(words), TASKS)
    return arguments.last(name) or ""


def _surroundings(argv: Sequence[str]) -> Surroundings:
    found = importlib.util.find_spec("torch")  # without importing it, which takes seconds
    packages = None if found is None or found.origin is None else Path(found.origin).parents[1]
    return Surroundings(Path.cwd(), sys.executable, packages, ("lockstep", "slurm", *argv))


def _check_syntax(job: Job) -> None:
    """Refuse lines of ``--setup`` that bash can't read, by themselves or before what follows them."""
    for text in ("\n".join(job.options.setup), script_of(job)) if job.options.setup else ():
        problem = slurm_commands.syntax_error(text)
        if problem:
            raise UsageError(f"--setup is no shell that bash can read ({problem}); mend its quotes or brackets")


def _write(job: Job) -> None:
    """Write the script; what is refused leaves nothing behind."""
    path, output = job.surroundings.folder / job.path, job.surroundings.folder / job.options.output_dir
    new = {folder for end in (output, path.parent) for folder in (end, *end.parents) if not exists(folder)}
    wanted = path
    try:
        for wanted in (output, path.parent):
            wanted.mkdir(parents=True, exist_ok=True)
        write_atomic(path, script_of(job))
    except (OSError, RunError) as error:
        for folder in sorted(new, reverse=True):  # those inside come first
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise UsageError(explain(error, wanted) if isinstance(error, OSError) else str(error)) from error
