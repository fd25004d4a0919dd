"""The command ``lockstep``: choose the subcommand, and end every failure the way a user can act on.

``lockstep --help`` must answer at once, so nothing heavy is imported here; each command imports what it needs.
"""

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from lockstep.core.errors import LockstepError, UsageError, nearest
from lockstep.distributed.rank_exit import RankExit

HELP = """\
usage: lockstep COMMAND [ARGUMENTS]

Train reinforcement-learning policies in batched simulation.

commands:
  train            train a policy on a task    lockstep train cartpole_balance
  train_multigpu   the same on several GPUs    lockstep train_multigpu cartpole_balance --num_gpus 2
  slurm            the same as a SLURM job     lockstep slurm --nodes 2 --gpus_per_node 4 -- train cartpole_balance
  play             run a trained policy        lockstep play --run logs/cartpole_balance/<run>
  export           write it as ONNX            lockstep export --run logs/cartpole_balance/<run>
  tasks            list the tasks              lockstep tasks
  benchmark        measure, scale, compare     lockstep benchmark training cartpole_balance
  report           a page of runs and results  lockstep report logs/cartpole_balance/<run>

  lockstep COMMAND --help                      what a command takes
  lockstep train TASK --help                   every setting of a task, with its default
  lockstep --version                           the installed version

exit codes: 0 done, 1 failed at run time, 2 wrong usage or configuration, 75 preempted, 130 interrupted
"""

_NAMES = ("train", "train_multigpu", "slurm", "play", "export", "tasks", "benchmark", "report")
_COMMANDS = {name: f"lockstep.cli.{name}" for name in _NAMES}
_MAX_WORD = 600
_LATER = ("doctor",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` by default) and return its exit code.

    An unexpected exception passes through, so its traceback is seen and Python exits with 1.
    """
    # Both are None when the caller closed them (>&-); what is printed then goes nowhere, until the process ends.
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that can't show a character still shows the rest
    rank_exit = RankExit()
    rank_exit.begin()
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return rank_exit.end(code)
    except LockstepError as error:
        if rank_exit.speaks_of(error):
            _say(f"{rank_exit.prefix}{error}")
        return rank_exit.end(error.exit_code, _one_line(str(error)))
    except SystemExit as error:
        # No command of ours ends like this: an env, a runner or a library does, in the middle of the work.
        message = f"{_ended_by(error)} before this command was done; an exception there would say why"
        _say(f"{rank_exit.prefix}{message}")
        return rank_exit.end(1, _one_line(message))
    except KeyboardInterrupt:
        return rank_exit.end(130)
    except BrokenPipeError:
        # The reader of our output is gone (| head). Python flushes once more at exit; that must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return rank_exit.end(1, "the reader of the output is gone")
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        message = f"{where}{error.strerror or error}"
        _say(f"{rank_exit.prefix}{message}")
        return rank_exit.end(1, _one_line(message))
    except Exception as error:
        rank_exit.end(1, _one_line(f"{type(error).__name__}: {error}"), traceback.format_exc())
        raise


def _dispatch(argv: list[str]) -> int:
    command, *rest = argv or [""]
    if command in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(f"lockstep {version('lockstep-rl')}")
        return 0
    name = command.replace("-", "_")
    if name in _COMMANDS:
        code: int = importlib.import_module(_COMMANDS[name]).main(rest)
        return code
    raise _unknown(command, name)


def _unknown(command: str, name: str) -> UsageError:
    known = ", ".join(_COMMANDS)
    if not command:
        return UsageError(f"no command is given; there are {known} (lockstep --help)")
    if name in _LATER:
        return UsageError(f"'{name}' comes in a later version; this one has {known}")
    if command.startswith("-"):
        return UsageError(f"the command comes first, as in lockstep train TASK, not {command!r}; there are {known}")
    return UsageError(f"unknown command {command!r}{nearest(name, _COMMANDS)} (there are {known})")


def _ended_by(error: SystemExit) -> str:
    """Return what was called where to end the process."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"sys.exit({'' if error.code is None else repr(error.code)}) was called ({frame.filename}:{frame.lineno})"


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens; the exit code still tells
        print(f"lockstep: error: {_one_line(message)}", file=sys.stderr, flush=True)


def _one_line(text: str) -> str:
    """Return a text on one line, in which words of a length that no path has are cut."""
    words = (
        word if len(word) <= _MAX_WORD else f"{word[:80]}... [{len(word)} characters] ...{word[-20:]}"
        for word in text.split()
    )
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
