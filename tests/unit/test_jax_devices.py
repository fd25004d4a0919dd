"""How many devices JAX makes of the CPU, in processes of their own: it decides once."""

import subprocess
import sys

import pytest

from tests.multiproc.commands import own_environment

pytest.importorskip("jax")

JOIN = """
import sys
import jax
from lockstep.distributed import jax_group

asked_by_script, num_devices = map(int, sys.argv[1:])
if asked_by_script:
    jax.config.update("jax_num_cpu_devices", asked_by_script)
ranks, _ = jax_group.join("cpu", num_devices=num_devices)
print(len(jax.devices()), ranks.num_ranks)
"""


@pytest.mark.parametrize(
    ("asked_by_script", "num_devices", "made", "num_ranks"), [(0, 2, 2, 2), (4, 2, 4, 2), (2, 3, 3, 3), (3, 0, 3, 3)]
)
def test_a_script_keeps_the_devices_that_it_has_asked_for(
    asked_by_script: int, num_devices: int, made: int, num_ranks: int
) -> None:
    command = [sys.executable, "-c", JOIN, str(asked_by_script), str(num_devices)]
    joined = subprocess.run(command, capture_output=True, text=True, env=own_environment({}), timeout=120, check=False)
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.split() == [str(made), str(num_ranks)]
