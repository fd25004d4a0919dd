"""``import lockstep`` and ``lockstep --help`` answer at once: nothing heavy is loaded before it is needed."""

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "jax", "mujoco", "warp", "genesis", "quadrants")
HELP_BUDGET_S = 0.5
HELP = [sys.executable, "-m", "lockstep", "--help"]

# The list of modules goes to stderr, past whatever the command prints; runpy is what `python -m` uses.
PREAMBLE = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
"""
STATEMENTS = {
    "import lockstep": "import lockstep",
    "lockstep --help": "import runpy; sys.argv[1:] = ['--help']; runpy.run_module('lockstep', run_name='__main__')",
}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize("what", STATEMENTS)
def test_nothing_heavy_is_imported(what: str) -> None:
    result = run([sys.executable, "-c", PREAMBLE + STATEMENTS[what]])
    loaded = json.loads(result.stderr.splitlines()[-1])
    assert "lockstep" in loaded
    assert [module for module in HEAVY if module in loaded] == []


def test_help_names_the_commands() -> None:
    text = run(HELP).stdout
    assert [command for command in ("train", "play", "tasks") if command not in text] == []


@pytest.mark.parametrize("command", [HELP, [sys.executable, "-c", "import lockstep"]], ids=["help", "import"])
def test_answers_within_the_budget(command: list[str]) -> None:
    run(command)  # the first one compiles bytecode and fills the disk cache
    durations_s = []
    for _ in range(5):
        before_s = children_s()
        run(command)
        durations_s.append(children_s() - before_s)
    assert statistics.median(durations_s) < HELP_BUDGET_S, durations_s


def children_s() -> float:
    """Processor time of the processes that this one waited for: what else the machine does has no part in it."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_the_command_is_installed_beside_python() -> None:
    command = Path(sys.executable).with_name("lockstep")
    assert run([str(command), "--help"]).stdout == run(HELP).stdout
