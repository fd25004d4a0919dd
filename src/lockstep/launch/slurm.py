"""A job for SLURM, decided and checked in full before anything is written or submitted."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from lockstep.core.errors import UsageError
from lockstep.core.files import exists, is_folder, require_place

WRITTEN_BY = "# Written by lockstep slurm."
"""In every job script, so that no other file is taken for one and overwritten."""

STOP_BEFORE_S = 120
_MAX_STOP_BEFORE_S = 65535  # sbatch takes no more
_JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}", re.ASCII)
_GPU_TYPE = re.compile(r"[\w.-]+", re.ASCII)
_MEMORY = re.compile(r"[0-9]{1,12}[KMGT]?", re.IGNORECASE)
_TIME_FORMATS = (  # as in the manual page of sbatch
    (r"(\d+)", (60,)),
    (r"(\d+):(\d+)", (60, 1)),
    (r"(\d+):(\d+):(\d+)", (3600, 60, 1)),
    (r"(\d+)-(\d+)", (86400, 3600)),
    (r"(\d+)-(\d+):(\d+)", (86400, 3600, 60)),
    (r"(\d+)-(\d+):(\d+):(\d+)", (86400, 3600, 60, 1)),
)

_STEP = "lockstep starts one launcher on each node, which starts the ranks"
_END = "the script saves and requeues by it"
# What may not come by --sbatch, with what is to be written instead.
_DECIDED = {
    **dict.fromkeys(("nodes", "N"), "write --nodes N"),
    **dict.fromkeys(("cpus-per-task", "c"), "write --cpus_per_task C"),
    "mem": "write --mem M",
    **dict.fromkeys(("partition", "p"), "write --partition P"),
    **dict.fromkeys(("time", "t"), "write --time T"),
    **dict.fromkeys(("account", "A"), "write --account A"),
    **dict.fromkeys(("job-name", "J"), "write --job_name J"),
    **dict.fromkeys(("output", "o", "error", "e"), "output goes to --output_dir D"),
    **dict.fromkeys(
        ("gres", "gpus", "G", "gpus-per-node", "gpus-per-task"), "GPUs are --gpus_per_node N and --gpu_type T"
    ),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node", "ntasks-per-gpu"), _STEP),
    **dict.fromkeys(("requeue", "no-requeue", "open-mode"), _END),
    "signal": f"{_END}; how early is --stop_before S",
    **dict.fromkeys(("chdir", "D"), "call lockstep slurm in the folder where the job is to run"),
    "wrap": "the job is what follows --",
}


@dataclass(frozen=True)
class Options:
    """What the user asked of SLURM; None where nothing was said."""

    num_nodes: int = 1
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    """On CPU cores, without GPUs."""
    gpu_type: str | None = None
    cpus_per_task: int | None = None
    """Of a task, of which there is one per node: for all ranks of the node together."""
    mem: str | None = None
    """Per node."""
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    stop_before_s: int = STOP_BEFORE_S
    """How long before the time limit the training is asked to save and stop."""
    setup: tuple[str, ...] = ()
    """Lines of shell."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch."""
    job_name: str | None = None
    output_dir: Path = Path("slurm")
    assets_dir: Path | None = None
    script: Path | None = None


@dataclass(frozen=True)
class Payload:
    """What the launcher of each node is to run."""

    name: str
    """Of the task or script."""
    words: tuple[str, ...]
    """Of ``lockstep train_multigpu``, but for what the script adds: numbers of nodes and ranks, and where they meet."""
    is_script: bool = False


@dataclass(frozen=True)
class Surroundings:
    """Where the job was asked for, and where it will run."""

    folder: Path
    python: str
    """Of the environment that lockstep is installed in."""
    packages: Path | None
    """Where that has torch, and NVIDIA's libraries for it."""
    command: tuple[str, ...]
    """By which the script was asked for."""


@dataclass(frozen=True)
class Job:
    """A job, ready to be written down."""

    name: str
    options: Options
    payload: Payload
    surroundings: Surroundings
    sbatch: tuple[str, ...]
    """Words of further options."""
    path: Path
    """Of the script."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node."""
        return self.options.ranks_per_node or self.options.gpus_per_node or 1

    def output(self, job_id: str) -> tuple[Path, Path]:
        """Return where the job's stdout and stderr go; ``%j`` stands for its id."""
        stem = self.options.output_dir / f"{self.name}_{job_id}"
        return Path(f"{stem}.out"), Path(f"{stem}.err")


def make_job(options: Options, payload: Payload, surroundings: Surroundings) -> Job:
    """Return the job that these options ask for. Nothing is written.

    Raises:
        UsageError: whatever can't work.
    """
    _check_printable(options, payload, surroundings)
    if options.gpus_per_node is not None and options.ranks_per_node is not None:
        raise UsageError(
            "--gpus_per_node (a rank for each GPU) and --ranks_per_node (on CPU cores, without GPUs) are two kinds of "
            "jobs; keep one"
        )
    if options.gpu_type is not None and options.gpus_per_node is None:
        raise UsageError(f"--gpu_type {options.gpu_type} goes with --gpus_per_node N; add it, or leave the type out")
    _check_format("gpu_type", options.gpu_type, _GPU_TYPE, "as SLURM names it, letters and digits: a100")
    _check_format("mem", options.mem, _MEMORY, "megabytes, or a number with K, M, G or T: 64G")
    for name in ("partition", "account"):
        _check_format(name, getattr(options, name), re.compile(r"\S+"), "one word")
    _check_time(options)
    name = options.job_name or _name_for_files(payload.name)
    if not _JOB_NAME.fullmatch(name):
        raise UsageError(
            f"job_name {name[:120]!r} becomes part of file names: letters, digits and . _ - + = @ (at most 100)"
        )
    if "\\" in str(options.output_dir):
        raise UsageError(
            f"output_dir {str(options.output_dir)!r} has a backslash, which SLURM takes for a sign to itself"
        )
    path = options.script or options.output_dir / f"{name}.sh"
    require_place("output_dir", surroundings.folder / options.output_dir)
    _check_script(surroundings.folder / path)
    return Job(
        name=name,
        options=options,
        payload=payload,
        surroundings=surroundings,
        sbatch=_sbatch_words(options.sbatch),
        path=path,
    )


def time_limit_s(text: str) -> int:
    """Return a time limit as sbatch reads it, in seconds.

    Raises:
        UsageError: sbatch would not take it.
    """
    for pattern, units in _TIME_FORMATS:
        match = re.fullmatch(pattern, text, re.ASCII)
        if match:
            return sum(int(part) * unit for part, unit in zip(match.groups(), units, strict=True))
    raise UsageError(
        f"time {text[:80]!r} is none of the forms that SLURM knows: minutes, minutes:seconds, hours:minutes:seconds, "
        "days-hours, days-hours:minutes, days-hours:minutes:seconds"
    )


def _check_printable(options: Options, payload: Payload, surroundings: Surroundings) -> None:
    """Refuse what would not stay on its line of the script, or could not be seen in it."""
    fields = [options.gpu_type, options.mem, options.partition, options.time, options.account, options.job_name]
    paths = [options.output_dir, options.assets_dir, options.script, surroundings.folder, surroundings.packages]
    words = [*options.setup, *options.sbatch, *payload.words, payload.name, surroundings.python, *surroundings.command]
    for text in [*fields, *(None if path is None else str(path) for path in paths), *words]:
        if text is not None and not text.isprintable():
            raise UsageError(f"{text[:80]!r} holds a line break or another unprintable character; leave it out")


def _check_format(name: str, text: str | None, pattern: re.Pattern[str], form: str) -> None:
    if text is not None and not pattern.fullmatch(text):
        raise UsageError(f"{name} {text[:80]!r} must be {form}")


def _check_time(options: Options) -> None:
    if not 1 <= options.stop_before_s <= _MAX_STOP_BEFORE_S:
        raise UsageError(f"stop_before must lie in 1 to {_MAX_STOP_BEFORE_S} seconds, not {options.stop_before_s}")
    if options.time is None:
        return
    limit_s = time_limit_s(options.time)
    if 0 < limit_s <= options.stop_before_s:  # 0 is no limit
        raise UsageError(
            f"time {options.time} is {limit_s} s, and the job would be asked to stop {options.stop_before_s} s before "
            "that; give it more --time, or a shorter --stop_before"
        )


def _name_for_files(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-")[:60] or "job"


def _sbatch_words(options: Sequence[str]) -> tuple[str, ...]:
    """Return the words of further options, in which quotes mean what they mean in a shell."""
    words: list[str] = []
    for option in options:
        try:
            parts = shlex.split(option)
        except ValueError as error:
            raise UsageError(f"--sbatch {option!r} can't be read ({error}); mend its quotes") from None
        if not parts or not re.match(r"--?[A-Za-z]", parts[0]):
            raise UsageError(f"--sbatch {option!r} is no option of sbatch; write it as there: --sbatch=--qos=high")
        _require_quotes(option, parts)
        for part in parts:
            name = part[2:].partition("=")[0] if part.startswith("--") else part[1:2] if part.startswith("-") else ""
            mend = _DECIDED.get(name.replace("_", "-"))
            if mend is not None:
                raise UsageError(f"--sbatch {option!r} is lockstep's to say: {mend}")
        words += parts
    return tuple(words)


def _require_quotes(option: str, parts: Sequence[str]) -> None:
    """Refuse a word that is neither an option nor its value: in a job script, sbatch would."""
    for index, part in enumerate(parts):
        before = parts[index - 1] if index else "--"
        if part.startswith("-") or (before.startswith("-") and "=" not in before):
            continue
        name, sign, first = before.partition("=") if before.startswith("-") else (parts[index - 2], " ", before)
        value = " ".join([first, *takewhile(lambda word: not word.startswith("-"), parts[index:])])
        quoted = shlex.quote(name + sign + '"' + value + '"')
        raise UsageError(
            f"--sbatch {option!r}: {part!r} belongs to no option; a value of several words has quotes of its own: "
            f"--sbatch={quoted}"
        )


def _check_script(path: Path) -> None:
    if is_folder(path):
        raise UsageError(f"script {path} is a folder; give --script FILE for the job script")
    require_place("script", path.parent if exists(path) else path)
    if exists(path):
        try:
            is_ours = WRITTEN_BY in path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"script {path} can't be read ({error.strerror}); choose another --script") from None
        if not is_ours:
            raise UsageError(
                f"script {path} was not written by lockstep slurm; choose another --script for the job script (what "
                "the job runs stands after --)"
            )
