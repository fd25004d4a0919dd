"""The training benchmark with JAX on real processes, one of them slow on purpose."""

from pathlib import Path

import pytest

from lockstep.benchmark.bundle import read_bundle
from lockstep.benchmark.splitting import BY_TIME_ALONE
from tests.multiproc.commands import lockstep

SMALL = (
    "--num_envs", "16", "--agent.num_steps_per_env", "8", "--agent.num_learning_epochs", "1",
    "--agent.num_mini_batches", "1", "--agent.actor_hidden_dims", "8", "--agent.critic_hidden_dims", "8",
    "--device", "cpu", "--num_devices", "1", "--ml_framework", "jax",
)  # fmt: skip
SCRIPT = str(Path(__file__).with_name("slow_jax_process.py"))
SLEEP_S = 0.05


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_slow_process_of_jax_is_a_straggler() -> None:
    words = ("training", "cartpole_classic", *SMALL, "--warm_up", "2", "--iterations", "4", "--output", "b.json")
    launch = ("train_multigpu", "--num_gpus", "2", "--device", "cpu", "--script", SCRIPT)
    done = lockstep(*launch, str(SLEEP_S), *words, timeout_s=250.0)
    assert done.returncode == 0, done.stdout + done.stderr
    bundle = read_bundle(Path("b.json"))
    assert (bundle.world_size, bundle.num_processes, bundle.slowest_rank) == (2, 2, 1)
    assert bundle.runtime is not None
    assert bundle.runtime.split_note == BY_TIME_ALONE
    late_s = SLEEP_S * 8
    first, second = bundle.ranks
    assert first.straggler_wait_s is not None and second.straggler_wait_s is not None
    assert first.straggler_wait_s.mean == pytest.approx(late_s, rel=0.1)
    assert second.straggler_wait_s.mean < 0.1 * late_s
    (straggler,) = [each for each in bundle.findings if each.reason == "straggler"]
    assert straggler.rank == 1
    assert "Rank 1" in straggler.words
    assert bundle.runtime.env_steps == 4 * 2 * 16 * 8
