"""A sweep as a user runs it: its result says what its bundles say, and Ctrl-C leaves nothing behind."""

import signal
from pathlib import Path

import pytest

from lockstep.benchmark.bundle import read_bundle
from lockstep.benchmark.scaling.result import read_scaling
from tests.multiproc.commands import SMALL, Command, lockstep, processes_here, wait_for

SWEEP = ("benchmark", "scaling", "cartpole_classic", *SMALL, "--num_gpus", "1,2", "--output", "found")


@pytest.fixture(autouse=True)
def _caches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_sweep_says_what_its_bundles_say() -> None:
    ended = lockstep(*SWEEP, "--rounds", "1", "--warm_up", "1", "--iterations", "4", timeout_s=240.0)
    assert ended.returncode == 0, ended.stderr
    result = read_scaling(Path("found/scaling.json"))
    bundles = [read_bundle(Path("found") / each.bundles[0]) for each in result.counts]
    assert [bundle.world_size for bundle in bundles] == [each.world_size for each in result.counts] == [1, 2]
    assert [bundle.total_envs for bundle in bundles] == [16, 32]
    one, two = (bundle.runtime for bundle in bundles)
    assert one is not None and two is not None
    assert result.counts[1].steps_per_s == (two.steps_per_s,)
    assert two.env_steps == 2 * one.env_steps == 2 * 16 * 8 * 4
    # As many iterations with as many envs on each rank: the efficiency is what the smaller job took over the larger.
    assert result.counts[1].efficiency.mean == pytest.approx(one.wall_s / two.wall_s)
    assert result.counts[1].losses is not None
    assert result.counts[1].losses.total == pytest.approx(1 - one.wall_s / two.wall_s)
    for finding in result.counts[1].findings:
        assert finding.reason == "nothing_lost" or finding.words in ended.stdout
    assert result.counts[1].verdict in ended.stdout
    assert Path("found/scaling.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_ends_the_job_that_runs_and_leaves_none_behind() -> None:
    command = Command(*SWEEP, "--iterations", "1000000")
    try:
        # The sweep, the launcher, torchrun's agent and the rank.
        command.wait_for(lambda: len(processes_here()) >= 4)
        command.send(signal.SIGINT)
        code, output, errors = command.end()
        assert (code, output.splitlines()[-1]) == (130, "round 1 of 3: --num_gpus 1")
        assert "the sweep was interrupted at --num_gpus 1" in errors
        wait_for(lambda: not processes_here())
        assert sorted(path.name for path in Path("found").iterdir()) == ["gpus_1_round_1.log"]
    finally:
        command.kill()
