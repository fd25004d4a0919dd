"""The mesh over two processes with two devices each: what it gives is what four devices of one process give."""

import json
from typing import Any

from tests.multiproc.commands import OF_TESTS, free_port, started_together

TIMEOUT_S = 280.0  # of which a few are needed on a machine that is free


def test_two_processes_of_two_devices() -> None:
    port = str(free_port())
    commands = [["-m", "tests.multiproc.jobs_jax_mesh", port, str(process)] for process in range(2)]
    with started_together(commands, [OF_TESTS] * 2) as processes:
        ends = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors for _, errors in ends)
    found: list[dict[str, Any]] = [json.loads(output.splitlines()[-1]) for output, _ in ends]
    for process, own in enumerate(found):
        assert own["ranks"] == [4, [2 * process, 2 * process + 1], True]
        assert own["global ranks"] == [2 * process, 2 * process + 1]
        assert own["processes"] == [0, 0, 1, 1]
        check_collectives(own["collectives"])
        check_placement(own["placement"], process)
        assert own["training"] == [-3.5, -4.5]
        check_population(own["population"], process)
        check_sentinel(own["sentinel"])
    assert found[0]["population"]["bits"] == found[1]["population"]["bits"]


def check_collectives(collectives: dict[str, Any]) -> None:
    # The ranks' sums are 0 + 1, 2 + 3, 4 + 5 and 6 + 7.
    assert collectives["found"] == {
        "sum": 28.0,
        "mean": 7.0,
        "max": 13.0,
        "min": 1.0,
        "all": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "ones": 4.0,
        "moments": [8.0, 3.5, 42.0],
    }
    assert collectives["not compiled"] == (
        "enable_jit False runs operation by operation in one process, and there are 2; start one with 4 devices "
        "(lockstep train --num_devices 4), or leave it on"
    )


def check_placement(placement: dict[str, Any], process: int) -> None:
    first = 10.0 * process
    assert placement["here"] == [[first, first + 1], [first + 2, first + 3]]
    assert placement["shape"] == [8]
    assert placement["whole"] == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    assert placement["kinds"] == [True] * 4
    assert placement["keys"]
    assert placement["copies"] == {
        "host": [0.0, 1.0, 2.0],
        "device": [0.0, 1.0, 2.0],
        "again": placement["whole"],
    }
    assert placement["one"] == [0.0, 1.0, 2.0]


def check_population(population: dict[str, Any], process: int) -> None:
    sums = [3.0, 12.0, 21.0, 30.0, 39.0]
    rows = [[3.0 * row, 3.0 * row + 1, 3.0 * row + 2] for row in range(4)]
    assert population["several"] == population["from copies"] == population["one by one"] == sums
    assert population["placed"] == [[rows[2 * process]], [rows[2 * process + 1]]]
    assert population["rows"] == rows
    assert len({tuple(bits) for bits in population["bits"]}) == 4


def check_sentinel(lines: list[str]) -> None:
    equal, changed, ahead, fewer = lines
    assert equal == ""
    assert changed.startswith(
        "ranks are out of step in iteration 40: weight differs on rank 2 (of 4), and no other array does"
    )
    assert ahead.startswith(
        "processes are out of step: process 1 is in iteration 41, process 0 in iteration 40; look for a loop"
    )
    assert fewer.startswith(
        "processes are out of step in iteration 40: process 1 has weight (float64 (3,)) where process 0 has count "
        "(int32 ()); build the same state"
    )
