"""Which run a training goes on with: that of its launch, that of its job, or none."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lockstep.cli.train_request import read
from lockstep.core.config import merge
from lockstep.core.errors import RunError, UsageError
from lockstep.core.outcome import is_final
from lockstep.core.run_directory import RunDirectory
from lockstep.core.runs import attempts_of, run_info
from lockstep.distributed.topology import START, Start, start_from_environment
from lockstep.learn.config import TrainConfig
from lockstep.session import attempts
from lockstep.session.attempts import RUN_KEY, Found, attempt_info, find, ways_to_start
from tests.unit.attempt_fixtures import CONFIG, LAUNCH, create, end, environment, go_on, requeued, save

# --- which start this is ---------------------------------------------------------------------------------------------


def test_a_start_is_what_the_agents_agreed_on() -> None:
    found = start_from_environment(environment(2, 1, "a", "rank 1 was killed by SIGKILL"))
    assert found == Start("a", 2, 1, "rank 1 was killed by SIGKILL")
    # A process that a rank has started is no rank, whatever it inherits.
    assert start_from_environment({START: environment(2)[START]}) == Start()


def test_a_start_under_a_bare_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {"RANK": "0", "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert start_from_environment(bare) == Start("7", 2, 2)
    assert start_from_environment(bare | {"TORCHELASTIC_RUN_ID": "none", "LOCKSTEP_JOB": "x"}).launch_id == "x"
    # Without any id it is still the same agent that starts the ranks again.
    nameless = [start_from_environment(bare | {"TORCHELASTIC_RUN_ID": "none"}).launch_id for _ in range(2)]
    assert nameless[0] == nameless[1] != ""
    # Containers of one image have agents of the same id on hosts of the same name.
    start = f"agent {os.getppid()} (begun "
    assert nameless[0].startswith(start)
    # Not this process, which may have begun in the same tick of the clock as the one that started it.
    later = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr("os.getppid", lambda: later.pid)
    ended = nameless[0].partition("begun")[2]
    assert start_from_environment(bare | {"TORCHELASTIC_RUN_ID": "none"}).launch_id.partition("begun")[2] != ended
    later.kill()
    later.wait()
    assert start_from_environment({}) == Start()


# --- a restart -------------------------------------------------------------------------------------------------------


def test_a_first_start_goes_on_with_nothing_and_with_what_it_is_given() -> None:
    given = create()
    assert find(CONFIG, None, environment(0)) == Found()  # although a launch of the same id has a run
    assert find(CONFIG, None, {}) == Found()
    assert find(CONFIG, given, environment(0)) == Found(given)


def test_a_restart_goes_on_with_the_run_of_its_launch_and_no_other() -> None:
    own = create()
    other = create(start=Start("launch 2"))
    for resume in (None, other, "auto"):
        assert find(CONFIG, resume, environment(1, 1)).path == own
    assert find(CONFIG, None, environment(1, 1, "launch 2")).path == other
    assert find(CONFIG, None, environment(1, 1, "launch 3")) == Found()
    assert find(CONFIG, other, environment(1, 1, "launch 3")) == Found(other)


def test_a_run_that_was_given_is_found_again_wherever_it_lies(tmp_path: Path) -> None:
    given = create().rename(tmp_path / "moved")
    go_on(given, Start("launch 2"), 0)
    assert run_info(given)["launch_id"] == "launch 2"
    assert find(CONFIG, given, environment(1, 1, "launch 2")).path == given


def test_a_run_that_this_host_does_not_see_is_not_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_ATTEMPT_DIR", str(tmp_path))

    def on_this_host(run: Path, number: int = 1) -> dict[str, str]:
        start = {"launch_id": LAUNCH, "number": number, "run_path": str(run)}
        return {"RANK": "0", START: json.dumps(start)}

    elsewhere = create().rename(tmp_path / "moved")
    assert find(CONFIG, None, on_this_host(elsewhere)).path == elsewhere
    assert find(CONFIG, None, on_this_host(tmp_path / "other", number=0)) == Found()
    with pytest.raises(RunError, match=r"does not see .*/other, where they have trained; nodes of an elastic job need"):
        find(CONFIG, None, on_this_host(tmp_path / "other"))
    assert is_final(tmp_path)


def test_who_waits_for_the_lock_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = create(key="a")
    holder = RunDirectory.open(path)
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += 1.0

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now_s)

    def waited_s(found: Found) -> float:
        nonlocal now_s
        now_s = 0.0
        with pytest.raises(UsageError, match="is in use by pid"):
            found.open()
        return now_s

    lease_s = 90.0  # of NFSv4: for so long a host that has lost its power keeps its locks
    assert waited_s(find(CONFIG, path, {})) == 0.0
    assert capsys.readouterr().err == ""
    assert waited_s(auto(key="a")) > lease_s
    said = capsys.readouterr().err
    assert said.startswith(f"lockstep: {path} is in use by pid") and said.count("\n") == 1
    assert waited_s(auto()) > lease_s
    assert waited_s(find(CONFIG, None, environment(1, 1))) > lease_s
    holder.close()


def test_a_bare_resume_that_is_started_again_goes_on_with_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    own = create()
    newest = create(start=Start("launch 2"))
    for name, value in environment(0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert read([CONFIG.task, "--resume"]).resume == newest
    monkeypatch.setenv(START, environment(1, 1)[START])
    assert read([CONFIG.task, "--resume"]).resume == own


@pytest.mark.parametrize(("now", "expected"), [(1, (32,)), (2, (16, 16)), (3, (12, 12, 8)), (16, (4,) * 8 + (0,) * 8)])
def test_the_envs_of_a_run_are_dealt_to_the_ranks_there_are(now: int, expected: tuple[int, ...]) -> None:
    create(world_size=2)
    fitted = find(CONFIG, None, environment(1)).fit(CONFIG, now)
    assert fitted.envs_by_rank(now) == expected
    assert merge(fitted, {"num_envs": CONFIG.num_envs}) == CONFIG


def test_envs_that_fit_stay_as_the_user_has_dealt_them() -> None:
    dealt = merge(CONFIG, {"num_envs": [12, 4]})
    assert dealt.with_total_envs(16, 2) is dealt
    assert dealt.with_total_envs(16, 1) == merge(CONFIG, {"num_envs": 16})
    assert CONFIG.with_total_envs(32, 2) is CONFIG


def test_a_finished_run_is_done_unless_more_is_asked_for() -> None:
    run = create()
    assert not find(CONFIG, None, environment(1)).is_done
    end(run, "finished")
    assert find(CONFIG, None, environment(1)).is_done
    assert not find(merge(CONFIG, {"max_iterations": 101}), None, environment(1)).is_done


def test_a_restart_says_why_and_where() -> None:
    run = create()
    save(run, 20)
    note = find(CONFIG, None, environment(2, 1, last_failure="rank 1: no luck")).note
    assert note == f"restart 2 after a failure (rank 1: no luck): {run} goes on from iteration 20"
    go_on(run, Start(LAUNCH, 2, 1), 20)
    note = find(CONFIG, None, environment(3, 1, last_failure="rank 1: no luck")).note
    assert note == f"restart 3: {run} goes on from iteration 20"  # for a node that came or went


def test_a_restart_waits_for_the_lock_of_a_rank_that_is_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    path = create()
    holder = RunDirectory.open(path)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        holder.close()

    monkeypatch.setattr("time.sleep", sleep)
    Found(path, is_found=True).open().close()
    assert len(waited) == 1
    holder = RunDirectory.open(path)
    with pytest.raises(UsageError, match="is in use by pid"):
        Found(path).open()  # a stranger's
    assert len(waited) == 1
    monkeypatch.setattr(attempts, "LOCK_WAIT_S", 0.0)
    with pytest.raises(UsageError, match="is in use by pid"):
        Found(path, is_found=True).open()
    holder.close()


# --- crash loops -----------------------------------------------------------------------------------------------------


def refusal(number: int, num_failures: int, last_failure: str = "") -> str:
    with pytest.raises(RunError) as caught:
        find(CONFIG, None, environment(number, num_failures, last_failure=last_failure))
    return str(caught.value)


def test_three_failures_without_a_new_checkpoint_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_ATTEMPT_DIR", str(tmp_path))
    run = create()
    save(run, 40)
    for number in (1, 2, 3):
        assert find(CONFIG, None, environment(number, number)).path == run
        go_on(run, Start(LAUNCH, number, number), 40)
    assert not is_final(tmp_path)
    assert refusal(4, 4, "rank 1: no luck") == (
        "3 attempts in a row failed before a new checkpoint after iteration 40; last reason: rank 1: no luck; mend it, "
        f"then --resume {run}"
    )
    assert is_final(tmp_path)
    end(run, "failed", "out of luck")
    assert "; last reason: out of luck; " in refusal(4, 4)
    # Attempts that failed before they could be noted count too.
    assert "4 attempts in a row" in refusal(5, 5)


def test_a_new_checkpoint_makes_up_for_failures() -> None:
    run = create()
    for number in (1, 2):
        go_on(run, Start(LAUNCH, number, number), 0)
    save(run, 10)
    assert find(CONFIG, None, environment(3, 3)).path == run
    go_on(run, Start(LAUNCH, 3, 3), 10)
    assert find(CONFIG, None, environment(5, 5)).path == run
    assert "3 attempts in a row failed before a new checkpoint after iteration 10;" in refusal(6, 6)


def test_starts_for_other_nodes_and_those_of_other_launches_are_no_failures() -> None:
    run = create(start=Start("launch 0"))
    for number in range(5):
        go_on(run, Start("launch 0", number, number), 0)
    for number in range(5):
        go_on(run, Start(LAUNCH, number, 0), 0)
    assert find(CONFIG, None, environment(5, 0)).path == run
    assert find(CONFIG, None, environment(7, 2)).path == run
    assert "3 attempts" in refusal(8, 3)


def test_failures_before_there_is_a_run_are_enough_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_ATTEMPT_DIR", str(tmp_path))
    assert find(CONFIG, None, environment(2, 2)) == Found()
    assert refusal(3, 3, "rank 0: no luck") == (
        "3 attempts in a row failed before the training began; last reason: rank 0: no luck; mend it, then start again"
    )
    assert is_final(tmp_path)


# --- --resume auto ---------------------------------------------------------------------------------------------------


def auto(config: TrainConfig = CONFIG, key: str = "") -> Found:
    return find(config, "auto", {"LOCKSTEP_RUN_KEY": key} if key else {})


def test_auto_finds_the_run_of_its_key() -> None:
    assert auto(key="a") == Found()
    own = create(key="a")
    create(key="b")
    create()
    assert auto(key="a").path == own
    assert auto(key="c") == Found()
    end(own, "finished")
    assert (auto(key="a").path, auto(key="a").is_done) == (own, True)


def test_auto_without_a_key_finds_the_newest_of_its_name_unless_it_is_finished() -> None:
    assert auto() == Found()
    named = merge(CONFIG, {"run_name": "x"})
    create()
    newest = create()
    own = create(named)
    create(merge(CONFIG, {"run_name": "x_2"}))
    assert auto().path == newest
    assert auto(named).path == own
    end(own, "preempted")
    assert auto(named).path == own
    end(own, "finished")
    assert auto(named) == Found()
    end(newest, "finished")
    assert auto() == Found()  # not the one before it, which was given up
    (newest / "config.yaml").unlink()
    assert auto().path is not None  # what is not whole does not count


def test_auto_goes_by_the_flags_and_says_what_differs() -> None:
    run = create(world_size=2)
    save(run, 30)
    assert auto().note == f"{run} goes on from iteration 30"
    changed = merge(CONFIG, {"num_envs": 8, "agent": {"learning_rate": 0.5, "actor_hidden_dims": [8]}})
    found = auto(changed)
    assert found.note == (
        f"{run} goes on from iteration 30, now with agent.learning_rate 0.5 (was 0.001), agent.actor_hidden_dims [8] "
        "(was [64, 64])"
    )
    assert found.fit(changed, 1) == merge(changed, {"num_envs": 32})


def test_auto_on_the_command_line() -> None:
    request = read([CONFIG.task, "--resume", "auto", "--checkpoint", "weights.pt"])
    assert (request.resume, request.checkpoint) == ("auto", Path("weights.pt"))
    assert ways_to_start(None, None) == [""]
    assert ways_to_start(Path("x"), "auto") == ["checkpoint", "resume"]


def test_what_run_json_says_of_attempts() -> None:
    run = create(key="k")
    go_on(run, Start("launch 2", 3, 2), 40)
    noted = [[each[name] for name in attempt_info(Start(), 0, {}) if name != "run_key"] for each in attempts_of(run)]
    assert noted == [[LAUNCH, 0, 0, None, 0], ["launch 2", 3, 2, None, 40]]
    assert [attempt_info(Start(), 0, requeued(times))["num_requeues"] for times in (0, 2)] == [0, 2]
    assert (run_info(run)["launch_id"], run_info(run)["run_key"]) == ("launch 2", "k")
    assert [attempt_info(Start(), 0, {RUN_KEY: key})["run_key"] for key in ("k", "")] == ["k", None]
