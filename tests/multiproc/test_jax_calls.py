"""Calls that nobody waits for, on several CPU devices of a process: JAX alone would hang in them, and then abort."""

import pytest

from tests.multiproc.commands import OF_TESTS, free_port, started_together

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
    port, sizes = str(free_port()), [str(num_processes), str(num_devices)]
    job = ["-m", "tests.multiproc.jobs_jax_calls", port]
    commands = [[*job, str(process), *sizes] for process in range(num_processes)]
    with started_together(commands, [OF_TESTS] * num_processes) as processes:
        for each in processes:
            output, errors = each.communicate(timeout=TIMEOUT_S)
            assert (each.returncode, output.splitlines()[-1:]) == (0, [line]), errors
