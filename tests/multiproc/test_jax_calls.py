"""Calls that nobody waits for, on several CPU devices of a process: JAX alone would hang in them, and then abort."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiproc.commands import free_port, own_environment

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0  # of which a few are needed on a machine that is free


@pytest.mark.parametrize(
    ("num_processes", "num_devices", "line"),
    [
        # 300 calls with 20 sums each over the numbers of the ranks, 0 + 1 + 2 + 3 and 0 + 1.
        (1, 4, "36000.0 [6.0, 7.0, 8.0, 9.0]"),
        (2, 2, "36000.0 [6.0, 7.0, 8.0, 9.0]"),
        (2, 1, "6000.0 [1.0, 2.0]"),
    ],
)
def test_calls_without_waiting(num_processes: int, num_devices: int, line: str) -> None:
    arguments = [str(num_processes), str(num_devices)]
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multiproc.jobs_jax_calls", port, str(process), *arguments],
            env=own_environment({"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(num_processes)
    ]
    try:
        for each in processes:
            output, errors = each.communicate(timeout=TIMEOUT_S)
            assert (each.returncode, output.splitlines()[-1:]) == (0, [line]), errors
    finally:
        for each in processes:
            each.kill()
            each.communicate()
