"""A job that SLURM puts back into its queue, but that comes to no new checkpoint, is over after a few tries."""

from pathlib import Path

import pytest

from lockstep.core.errors import RunError
from lockstep.core.outcome import is_final
from lockstep.distributed.topology import Start
from lockstep.session.attempts import RUN_KEY, find
from tests.unit.attempt_fixtures import CONFIG, create, end, go_on, requeued, save


def tried(*tries: tuple[int, int, str], newest: int = 40) -> Path:
    """Make a run in which tries were made: after how many requeues, from which iteration, and by which launch."""
    run = create(key="k")
    for times, iteration, launch in tries:
        go_on(run, Start(launch), iteration, requeued(times))
    save(run, newest)
    return run


def test_a_job_that_is_stopped_before_each_new_checkpoint_is_not_requeued_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_ATTEMPT_DIR", str(tmp_path))
    run = tried((0, 0, "a"), (1, 40, "b"), (2, 40, "c"))
    assert find(CONFIG, "auto", requeued(3)).path == run
    go_on(run, Start("d"), 40, requeued(3))
    assert not is_final(tmp_path)
    with pytest.raises(RunError) as caught:
        find(CONFIG, "auto", requeued(4))
    assert str(caught.value) == (
        "3 tries of this job in a row made no checkpoint after iteration 40; give it more --time, or take checkpoints "
        f"more often (--checkpoints.interval_s), then --resume {run}"
    )
    assert is_final(tmp_path)
    assert find(CONFIG, run, requeued(4)).path == run  # who names it may go on
    save(run, 50)
    assert find(CONFIG, "auto", requeued(4)).path == run


@pytest.mark.parametrize(
    "tries",
    [
        [(1, 40, "a"), (1, 40, "a"), (1, 40, "a"), (2, 40, "b")],  # restarts of one launch
        [(1, 40, "a"), (2, 40, "b"), (4, 40, "c"), (4, 40, "d")],  # among them the one that now starts ranks again
        [(1, 20, "a"), (1, 40, "a"), (2, 40, "b"), (3, 40, "c")],  # the first one made the newest checkpoint
        [(1, 40, "a"), (2, 20, "b"), (3, 40, "c")],
        [(0, 40, "a"), (0, 40, "b"), (0, 40, "c")],  # by hand, in one job
    ],
)
def test_what_is_no_crash_loop_of_a_job(tries: list[tuple[int, int, str]]) -> None:
    run = tried(*tries)
    assert find(CONFIG, "auto", requeued(4)).path == run


def test_quick_tries_by_hand_are_no_crash_loop_and_a_finished_run_is_none() -> None:
    by_hand = {RUN_KEY: "k"}
    run = create(key="k")
    for _ in range(5):
        go_on(run, Start(), 0, by_hand)
        assert find(CONFIG, "auto", by_hand).path == run
    for times in range(1, 5):
        go_on(run, Start(), 0, requeued(times))
    assert find(CONFIG, "auto", by_hand).path == run
    assert find(CONFIG, "auto", requeued(0)).path == run
    go_on(run, Start(), 0, by_hand)  # in between somebody has looked at it
    assert find(CONFIG, "auto", requeued(5)).path == run
    for times in range(5, 9):
        go_on(run, Start(), 0, requeued(times))
    end(run, "finished")
    assert find(CONFIG, "auto", requeued(9)).is_done
