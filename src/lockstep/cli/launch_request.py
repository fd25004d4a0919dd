"""From the words after ``lockstep train_multigpu`` to the launcher's options and to what each rank runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import (
    Arguments,
    Takes,
    flag_name,
    number,
    parse,
    path_of,
    switched_on,
    take_out,
)
from lockstep.cli.usage import MULTIGPU_HABITS, TRAIN_HABITS, unknown_flag
from lockstep.core.blame import hang_timeout
from lockstep.core.errors import UsageError
from lockstep.core.files import exists, is_file, why_unseen
from lockstep.core.gpu_mask import Gpu
from lockstep.launch.devices import visible
from lockstep.launch.plan import Options, Work
from lockstep.launch.rendezvous import Nodes, Rendezvous, plan_rendezvous, with_coordinator

if TYPE_CHECKING:
    from lockstep.cli.train_request import Request
    from lockstep.learn.config import TrainConfig

_NODE_FLAGS = (
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "local_addr",
)
PLACE_FLAGS = ("num_gpus", "nproc_per_node", *_NODE_FLAGS)
"""What says where ranks run; a job script knows that by itself."""
LAUNCH_FLAGS = {
    **dict.fromkeys(PLACE_FLAGS, Takes.ONE),
    "max_restarts": Takes.ONE,
    "hang_timeout": Takes.ONE,
    "log_all_ranks": Takes.SWITCH,
    "tee": Takes.ONE,
    "log_dir": Takes.ONE,
    "dry_run": Takes.SWITCH,
    "distributed": Takes.SWITCH,
    "coordinator_address": Takes.ONE,
    "script": Takes.ONE,
}
"""The launcher's own flags; all others are those of what it launches."""
TRAIN = ("train",)
"""The command that each rank runs if nothing else is asked for."""
_ALL_GPUS = ("all", "auto", "gpu")  # the latter two are torchrun's words
_MAX_RANKS_PER_NODE = 1024


@dataclass(frozen=True)
class Words:
    """A command line in its three parts."""

    own: Arguments
    """The launcher's flags."""
    train: tuple[str, ...]
    """Everything else."""
    script: tuple[str, ...]
    """What follows the path after ``--script``."""


def split(argv: Sequence[str]) -> Words:
    """Take a command line apart.

    Raises:
        UsageError: a flag that neither the launcher nor ``lockstep train`` has, or one of the launcher's without its
            value.
    """
    own, train, script = take_out(argv, LAUNCH_FLAGS, final="script")
    _check_known(train)
    return Words(parse(own, LAUNCH_FLAGS.__getitem__), tuple(train), tuple(script))


def options_of(own: Arguments) -> Options:
    """Return the launcher's options.

    Raises:
        UsageError: a value that can't be.
    """
    if "num_gpus" in own.flags and "nproc_per_node" in own.flags:
        raise UsageError("--num_gpus and --nproc_per_node are the same; keep one")
    count = own.flags.get("num_gpus", own.flags.get("nproc_per_node"))
    max_restarts = number("max_restarts", own.flags.get("max_restarts", ["0"]), minimum=0)
    limit = own.last("hang_timeout")
    switched_on(own, "distributed")  # what it asks for is what the command does
    return Options(
        num_gpus=None if count is None or count[-1] in _ALL_GPUS else number("num_gpus", count, 1, _MAX_RANKS_PER_NODE),
        nodes=with_coordinator(
            Nodes(**{name: own.last(name) for name in _NODE_FLAGS}), own.last("coordinator_address")
        ),
        max_restarts=max_restarts,
        log_all_ranks=switched_on(own, "log_all_ranks"),
        tee=own.last("tee"),
        log_dir=path_of(own, "log_dir"),
        hang_timeout_s=None if limit is None else hang_timeout(limit, "--hang_timeout"),
        coordinator_address=own.last("coordinator_address"),
    )


def work_of(
    words: Words,
    options: Options,
    gpus: Sequence[Gpu],
    environment: Mapping[str, str],
    command: Sequence[str] = TRAIN,
) -> Work:
    """Return what each rank runs, after checking it as ``lockstep train`` would.

    Args:
        words: of the command line.
        options: of the launcher.
        gpus: what ``find_gpus`` returned.
        environment: of the launcher.
        command: of lockstep that takes the words of a training; any but ``TRAIN`` saves nothing when it is stopped.

    Raises:
        UsageError: whatever is wrong with it.
    """
    if "script" in words.own.flags:
        return _script(words)  # which may well be one of JAX
    from lockstep.cli.train_request import read

    num_ranks = options.num_gpus or len(visible(environment, gpus)) or 1
    rendezvous = plan_rendezvous(options.nodes, "job")
    world_size = num_ranks * rendezvous.num_nodes
    request = read(words.train, world_size)
    config = request.config
    _require_count(words, options, request)
    return Work(
        words=("-m", "lockstep", *command, *words.train),
        device=config.device,
        has_phases=tuple(command) == TRAIN and not config.runner,
        saves=tuple(command) == TRAIN,
        envs_by_rank=_envs_by_process(config, world_size),
        fewest_envs=_fewest_envs(words, num_ranks, rendezvous),
        has_coordinator=_has_coordinator(options, config),
    )


def _require_count(words: Words, options: Options, request: "Request") -> None:
    """Refuse a run that goes on on CPU cores without the number of ranks, in words that know why it is the CPU."""
    is_of_run = isinstance(request.resume, Path) and all(flag_name(word) != "device" for word in words.train)
    if options.num_gpus is None and request.config.device == "cpu" and is_of_run:
        raise UsageError(
            f"the run {request.resume} has device cpu, where the number of ranks must be given: add --num_gpus N"
        )


def _envs_by_process(config: "TrainConfig", world_size: int) -> tuple[int, ...]:
    """Return the envs of each process: with JAX it may have several ranks."""
    from lockstep.session.framework import count_ranks

    num_ranks = count_ranks(config, world_size)
    shares = config.envs_by_rank(num_ranks)
    each = num_ranks // world_size
    return tuple(sum(shares[first : first + each]) for first in range(0, num_ranks, each))


def _has_coordinator(options: Options, config: "TrainConfig") -> bool:
    """Return whether the processes meet at a coordinator of their own.

    Raises:
        UsageError: they don't, and one is given.
    """
    from lockstep.session.framework import FRAMEWORKS

    has_one = FRAMEWORKS.get(config.ml_framework).has_coordinator
    if options.coordinator_address is not None and not has_one:
        raise UsageError(
            f"--coordinator_address belongs to JAX, and this is ml_framework {config.ml_framework}; leave it out "
            "(nodes find one another by --master_addr or --rdzv_endpoint), or use --ml_framework jax"
        )
    return has_one


def _fewest_envs(words: Words, num_ranks: int, rendezvous: Rendezvous) -> int | None:
    """Return the envs of an elastic job that starts on its fewest nodes, after checking that it can.

    Raises:
        UsageError: what is asked for can't be done on so few.
    """
    if rendezvous.min_nodes is None:
        return None
    from lockstep.cli.train_request import read

    world_size = num_ranks * rendezvous.min_nodes
    try:
        return sum(_envs_by_process(read(words.train, world_size).config, world_size))
    except UsageError as error:
        raise UsageError(f"on {world_size} of {rendezvous.count} x {num_ranks} ranks: {error}") from None


def _script(words: Words) -> Work:
    path = path_of(words.own, "script")
    assert path is not None
    for word in words.train:
        name = flag_name(word)
        if name != "device" and name is not None:
            raise UsageError(f"{word!r} stands before --script; a script's own arguments follow its path")
    before = parse(words.train, lambda name: Takes.ONE)
    for word in before.positionals:
        raise UsageError(f"unexpected {word!r} before --script; a script's own arguments follow its path")
    if not exists(path):
        raise UsageError(f"script {str(path)!r} does not exist{why_unseen(path)}; give the path of a Python file")
    if not is_file(path):
        raise UsageError(f"script {str(path)!r} is no file; give the path of a Python file")
    name = str(path)
    return Work(
        words=(f"./{name}" if name.startswith("-") else name, *words.script),
        device=before.last("device") or "auto",
        is_script=True,
        warnings=_flags_for_the_launcher(words.script),
    )


def _flags_for_the_launcher(script: Sequence[str]) -> tuple[str, ...]:
    """Return a warning of the launcher's flags among a script's words; those after a bare -- are meant for it."""
    before = script[: script.index("--")] if "--" in script else script
    found = [word.partition("=")[0] for word in before if flag_name(word) in LAUNCH_FLAGS]
    if not found:
        return ()
    names = list(dict.fromkeys(found))
    go = "goes" if len(names) == 1 else "go"
    line = (
        f"{', '.join(names)} after the script's path {go} to the script; what is meant for the "
        "launcher stands before --script"
    )
    return (line,)


def _check_known(train: Sequence[str]) -> None:
    """Refuse a flag that nobody has, with the nearest that the launcher or ``lockstep train`` has."""
    if all(flag_name(word) is None for word in train):
        return
    from lockstep.cli.train_request import flag_names
    from lockstep.core.config import groups
    from lockstep.learn.config import TrainConfig

    known = [*LAUNCH_FLAGS, *flag_names()]
    for word in train:
        name = flag_name(word)
        # A name with a dot may be a setting of the task's, which is not known yet.
        if name is not None and name not in known and "." not in name:
            raise unknown_flag(name, known, {**TRAIN_HABITS, **MULTIGPU_HABITS}, groups(TrainConfig(task="")))
