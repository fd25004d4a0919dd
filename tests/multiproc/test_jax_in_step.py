"""One training by JAX on one device, on four of one process, and on two in each of two processes: one curve."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.core.runs import newest_iteration
from tests.multiproc.commands import assert_same_curve, free_port, lockstep, metrics_of, only_run, own_environment
from tests.multiproc.jax_jobs import ADAPTIVE, PPO, SAC, TASK, TIMEOUT_S, ranks_of, train, train_here, with_example

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_run_goes_the_same_way_on_any_devices_and_processes(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    os.chdir(tmp_path / "alone")
    reference = metrics_of(train(*PPO, "--max_iterations", "22"))
    assert [record["env_steps"] for record in reference] == [32 * 8 * (index + 1) for index in range(22)]
    os.chdir(tmp_path)

    # Two processes of two devices each, by torchrun alone.
    command = [*TORCHRUN, "-m", "lockstep", "train", *PPO, "--num_devices", "2", "--max_iterations", "20"]
    started = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=own_environment({}), check=False
    )
    assert started.returncode == 0, started.stderr
    run = only_run(TASK)
    assert "32 envs on 4 ranks (2 CPU devices in each of 2 processes)" in started.stdout
    assert started.stdout.count("iteration 20/20") == 1
    assert_same_curve(run, reference[:20])
    assert ranks_of(run) == [(0, 0, "cpu:0"), (1, 0, "cpu:1"), (2, 1, "cpu:0"), (3, 1, "cpu:1")]
    assert [path.name for path in sorted((run / "ranks").iterdir())] == ["rank_0.log", "rank_1.log"]
    assert "world_size: 4" in (run / "config.yaml").read_text()
    shutil.copytree(run, "copy", symlinks=True)

    # On with it on one device, as the run itself has it...
    resumed = lockstep("train", "--resume", "copy", "--max_iterations", "21", timeout_s=TIMEOUT_S)
    assert resumed.returncode == 0, resumed.stderr
    assert "32 envs on 2 ranks (2 CPU devices of this process)" in resumed.stdout
    assert_same_curve(Path("copy"), reference[:21])

    # ... and on four.
    train("--resume", str(run), "--num_devices", "4", "--max_iterations", "22")
    assert_same_curve(run, reference)
    assert [rank for rank, _, _ in ranks_of(run)] == [0, 1, 2, 3]

    played = lockstep("play", "--run", str(run), "--json", "--num_episodes", "4", "--device", "cpu")
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["mean_return"] > 1.0


SCRIPT = """
import json
import sys
import jax
import lockstep

address, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, process)
config = lockstep.make_config(
    "cartpole_classic", ml_framework="jax", runner="own_jax_algorithm:Algorithm", device="cpu", num_envs=8,
    max_iterations=1, logger="none", env={"action_kind": "discrete"}, evaluation={"interval": 0},
)
outcome = lockstep.train(config)
again = lockstep.train(config, resume="auto")  # the processes meet again, and find the run finished
others = [lockstep.make_config("cartpole_classic", num_envs=4, **settings) for settings in json.loads(sys.argv[3])]
print(outcome.status, outcome.run_path == again.run_path, *(lockstep.train(other).status for other in others))
"""


def test_a_script_that_has_called_initialize_is_used_as_it_is() -> None:
    """With an algorithm of its own, and by SAC and PPO, which go the way that they go on one device."""
    with_example()
    Path("script.py").write_text(SCRIPT)
    address = f"127.0.0.1:{free_port()}"
    others = json.dumps([SAC | {"log_root": "sac"}, ADAPTIVE | {"log_root": "ppo"}])
    started = [
        subprocess.Popen(
            [sys.executable, "script.py", address, str(process), others],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=own_environment({"LOCKSTEP_RUN_KEY": "night"}),
        )
        for process in range(2)
    ]
    by_sac, by_ppo = [
        metrics_of(train_here(num_envs=16, num_devices=1, log_root=f"alone_{name}", **settings))
        for name, settings in (("sac", SAC), ("ppo", ADAPTIVE))
    ]
    ended = [process.communicate(timeout=TIMEOUT_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert [said.splitlines()[-1] for said, _ in ended] == ["finished True finished finished"] * 2
    assert "32 envs on 4 ranks (2 CPU devices in each of 2 processes)" in ended[0][0]
    run = only_run(TASK)
    assert newest_iteration(run) == 1
    assert [rank for rank, _, _ in ranks_of(run)] == [0, 1, 2, 3]
    assert ended[0][0].count("16 envs on 4 ranks (2 CPU devices in each of 2 processes)") == 2
    assert [record["num_updates"] for record in by_sac] == [0, 3, 3, 3, 3]
    assert len({record["learning_rate"] for record in by_ppo}) > 1
    for name, reference in (("sac", by_sac), ("ppo", by_ppo)):
        same = only_run(TASK, Path(name))
        assert_same_curve(same, reference)
        assert [process for _, process, _ in ranks_of(same)] == [0, 0, 1, 1]
