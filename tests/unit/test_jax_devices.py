"""How many devices JAX makes of the CPU, in processes of their own: it decides once."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.distributed.local_devices import has_cuda_plugin
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


@pytest.mark.parametrize("address", ["banana", "host:", "host:0", "host:65536", "::1", "::1:2000", "a b:2000"])
def test_an_address_of_the_coordinator_is_host_and_port(address: str) -> None:
    command = [sys.executable, "-c", "from lockstep.distributed import jax_group; jax_group.join('cpu')"]
    environment = own_environment({"RANK": "1", "WORLD_SIZE": "2", "JAX_COORDINATOR_ADDRESS": address})
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert f"UsageError: the coordinator's address {address!r} is not of the form HOST:PORT" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("JAX_PLATFORMS", "cuda", "device 'auto' was asked for and JAX has none (JAX_PLATFORMS is 'cuda')"),
        ("JAX_NUM_CPU_DEVICES", "many", 'JAX refuses the environment: Invalid value "many" for JAX flag jax_num_cpu'),
        ("JAX_ENABLE_X64", "maybe", "JAX refuses the environment: invalid truth value 'maybe' for environment"),
    ],
)
def test_a_variable_that_jax_refuses_is_one_line(variable: str, value: str, words: str, tmp_path: Path) -> None:
    if variable == "JAX_PLATFORMS" and has_cuda_plugin():
        pytest.skip("JAX has what it needs for GPUs here")
    command = [sys.executable, "-m", "lockstep", "train", "cartpole_classic", "--ml_framework", "jax"]
    environment = own_environment({variable: value})
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert words in done.stderr
    assert not (tmp_path / "logs").exists()
