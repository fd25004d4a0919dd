import errno
import importlib
import resource
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli import main as command_line
from lockstep.cli.main import main
from lockstep.core.errors import RunError, UsageError

HEAVY = ("torch", "jax", "mujoco", "warp", "numpy", "pydantic", "tyro", "yaml", "rich", "tensorboard", "matplotlib")


def run(*argv: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; ``code`` instead of it, if given."""
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "lockstep", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Runs ``lockstep fail``, a command that raises the given exception."""

    def run_failing(exception: BaseException) -> int:
        def fail(argv: list[str]) -> int:
            raise exception

        module = types.ModuleType("failing_command")
        vars(module)["main"] = fail
        monkeypatch.setitem(sys.modules, "failing_command", module)
        monkeypatch.setitem(command_line._COMMANDS, "fail", "failing_command")
        return main(["fail"])

    return run_failing


def test_help_is_static_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from lockstep.cli.main import main; code = main(['--help']); "
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = run(code=code)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    for name in ("train", "train_multigpu", "slurm", "play", "export", "tasks", "benchmark", "report"):
        assert f"\n  {name} " in done.stdout
    assert "doctor" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "budget_s"), [(["--help"], 0.5), (["train", "--task", "cartpole_balance", "--help"], 1.5)]
)
def test_help_answers_within_its_budget(argv: list[str], budget_s: float) -> None:
    def processor_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def duration() -> float:
        before = processor_s()
        assert run(*argv).returncode == 0
        return processor_s() - before

    assert any(duration() < budget_s for _ in range(3))  # the first one compiles bytecode


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no command is given; there are train, train_multigpu, slurm, play, export, tasks"),
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["--task", "cartpole"], "the command comes first"),
        (
            ["doctor"],
            "'doctor' comes in a later version; this one has train, train_multigpu, slurm, play, export, tasks, bench",
        ),
        (["train", "--num_gpus", "2"], "lockstep train runs one process; several GPUs are lockstep train_multigpu"),
        (["benchmark"], "what is to be measured? Give one of startup, runtime, training"),
        (["a\nb"], r"unknown command 'a\nb'"),
    ],
)
def test_wrong_commands_exit_with_2_and_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"lockstep: error: {words}")
    assert len(printed.err.splitlines()) == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep 0.")


@pytest.mark.parametrize(
    ("exception", "code", "line"),
    [
        (UsageError("num_envs must be positive"), 2, "num_envs must be positive"),
        (RunError("the loss\nis NaN"), 1, "the loss is NaN"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), 1, "/data/x: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied"), 1, "Permission denied"),
    ],
)
def test_failures_are_one_line_with_their_exit_code(
    command: Callable[[BaseException], int],
    exception: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(exception) == code
    assert capsys.readouterr().err == f"lockstep: error: {line}\n"


@pytest.mark.parametrize(("code", "shown"), [(0, "0"), (None, ""), (2, "2"), ("no\nlicence", r"'no\nlicence'")])
def test_an_exit_of_other_code_is_a_failure(
    command: Callable[[BaseException], int], code: object, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(SystemExit(code)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lockstep: error: sys.exit({shown}) was called ({__file__}:")


def test_interruption_is_silent(command: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_an_unexpected_exception_keeps_its_traceback() -> None:
    code = (
        "import sys; from lockstep.cli import main, tasks; "
        "tasks.main = lambda argv: 1 / 0; sys.exit(main.main(['tasks']))"
    )
    done = run(code=code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_exit_codes_of_real_processes() -> None:
    done = run("train", "cartpole_balence")
    assert done.returncode == 2
    assert "did you mean 'cartpole_balance'?" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


class Interrupting:
    """Ctrl-C while Python looks for a module."""

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == self._module:
            raise KeyboardInterrupt


@pytest.mark.parametrize("module", ["lockstep.cli.main", "lockstep.cli.tasks"])
def test_ctrl_c_before_there_is_anybody_to_take_it(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(module), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["lockstep", "tasks"])
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    name, _, function = project["scripts"]["lockstep"].partition(":")
    try:
        code = getattr(importlib.import_module(name), function)()
    except KeyboardInterrupt:
        pytest.fail("it got through")
    assert code == 130
    assert capsys.readouterr() == ("", "")


def test_words_of_thousands_of_characters_are_cut(
    command: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = 500 * "p"
    assert command(UsageError(f"unexpected {5000 * 'x'}yz in {path}")) == 2
    shown = capsys.readouterr().err
    assert shown == f"lockstep: error: unexpected {80 * 'x'}... [5002 characters] ...{18 * 'x'}yz in {path}\n"


def test_a_reader_that_goes_away_is_no_reason_for_a_traceback() -> None:
    # The pipe has no reader from the start, so the first write fails.
    code = (
        "import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 1); "
        "from lockstep.cli.main import main; sys.exit(main(['tasks', '--json']))"
    )
    done = run(code=code)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["tasks"]])
def test_a_terminal_that_knows_only_ascii(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *argv], capture_output=True, timeout=60, env={"PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


@pytest.mark.parametrize("argv", ["--help", "tasks"])
def test_closed_output_is_no_failure(argv: str) -> None:
    command = f"'{sys.executable}' -m lockstep {argv} >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_one_line() -> None:
    command = f"'{sys.executable}' -m lockstep tasks > /dev/full"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "lockstep: error: No space left on device\n")
