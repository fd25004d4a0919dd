"""``lockstep train`` for several ranks: which tasks and launchers allow it, and how envs are dealt out."""

import re
from pathlib import Path

import pytest

from lockstep.cli.train_request import read
from lockstep.core.errors import UsageError
from tests.unit.cli_train_fixtures import RECIPE, Pendulum, add_pendulum, config_of, refused


@pytest.fixture(autouse=True)
def _pendulum(monkeypatch: pytest.MonkeyPatch) -> None:
    add_pendulum(monkeypatch)


def test_distributed_is_accepted_under_a_launcher_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "WORLD_SIZE > 1" in refused("pendulum", "--distributed")
    assert config_of("--distributed", "false") == RECIPE
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert config_of("--distributed") == RECIPE


def test_a_task_that_needs_one_process_is_refused_before_several_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pendulum, "distributed_unsupported", "its wind blows through one process", raising=False)
    assert read(["pendulum"], world_size=1).config == RECIPE
    with pytest.raises(UsageError) as refusal:
        read(["pendulum"], world_size=2)
    assert str(refusal.value) == (
        "task pendulum can't train on 2 ranks: its wind blows through one process; run it with one process"
    )


def shares(world_size: int, *argv: str) -> tuple[int, ...]:
    return read(["pendulum", *argv], world_size).config.envs_by_rank(world_size)


def test_envs_are_per_rank_or_shared_out_or_named() -> None:
    assert shares(3, "--num_envs", "8") == (8, 8, 8)
    assert shares(2, "--num_envs", "320,192") == (320, 192)
    assert shares(2, "--num_envs", "320", "192") == (320, 192)
    assert shares(2, "--num_envs", "16,0") == (16, 0)
    # 10 blocks of 4 on 3 ranks
    assert shares(3, "--total_envs", "40") == (16, 12, 12)
    assert shares(2, "--total_envs", "24", "--agent.num_mini_batches", "6") == (12, 12)
    assert shares(2, "--total_envs", "16", "--num_envs", "8") == (8, 8)


@pytest.mark.parametrize(
    ("world_size", "argv", "words"),
    [
        (2, ["--num_envs", "8,8,8"], "num_envs 8,8,8 is for 3 ranks, and there are 2; give one number per rank"),
        (1, ["--num_envs", "8,8"], "there is 1"),
        (2, ["--num_envs", "8,6"], "num_envs 6 is not divisible by agent.num_mini_batches 4"),
        (2, ["--num_envs", "0,0"], "must have at least one env on some rank"),
        (
            2,
            ["--total_envs", "42"],
            "total_envs 42 is not divisible by agent.num_mini_batches 4; use --total_envs 40",
        ),
        (4, ["--total_envs", "8"], "total_envs 8 leaves some of 4 ranks without envs"),
        (3, ["--total_envs", "16", "--num_envs", "8"], "on 3 rank(s) contradict each other"),
    ],
)
def test_envs_that_do_not_fit_the_ranks(world_size: int, argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        read(["pendulum", *argv], world_size)


@pytest.mark.parametrize(
    ("then", "num_envs", "now", "expected"),
    [
        (2, "[48, 16]", 2, (48, 16)),  # each keeps its own
        (2, "[48, 16]", 1, (64,)),
        (2, "[48, 16]", 3, (24, 20, 20)),
        (1, "8", 4, (4, 4, 0, 0)),  # fewer blocks than ranks: some have none
        (4, "16", 2, (32, 32)),
    ],
)
def test_a_run_that_goes_on_keeps_its_envs(
    tmp_path: Path, then: int, num_envs: str, now: int, expected: tuple[int, ...]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "config.yaml").write_text(f"task: pendulum\nnum_envs: {num_envs}\nworld_size: {then}\n")
    assert shares(now, "--resume", str(run)) == expected
    assert shares(1, "--resume", str(run), "--num_envs", str(sum(expected))) == (sum(expected),)
    with pytest.raises(UsageError, match=f"the run has {sum(expected)} envs, not 200; a run resumes with as many"):
        read(["pendulum", "--resume", str(run), "--num_envs", "100"], 2)
