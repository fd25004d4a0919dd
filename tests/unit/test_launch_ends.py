"""Which rank's end is the job's, and what agent and ranks leave that tells it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lockstep.core import beats
from lockstep.core.beats import Beat
from lockstep.core.blame import Verdict
from lockstep.core.outcome import FOLLOWS, RankOutcome, read_outcomes, write_outcome
from lockstep.distributed.topology import START
from lockstep.distributed.torch_restarts import agent_class
from lockstep.launch.ends import (
    JobEnd,
    RankEnd,
    deciding,
    ended_early,
    exit_code,
    first_failure_s,
    is_meeting,
    read_end,
)
from lockstep.launch.logs import Follower, last_lines, read_attempt_logs
from tests.unit.launch_fixtures import CRASHED, KILLED, TERMINATED, ended, exited, failure, leave


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([], 0),
        ([ended(0, said=0), ended(1, said=0)], 0),
        ([ended(0, said=75), ended(1, said=75)], 75),
        ([ended(0, said=130), ended(1, said=75)], 130),
        ([ended(0, said=130), ended(1, 2, said=2)], 2),
        ([ended(0, 1, said=1), ended(1, 2, said=2)], 1),
        ([ended(0, 1, said=1), ended(1, KILLED)], 137),  # the peer of a rank that was killed fails too
        ([ended(0, CRASHED, order=1), ended(1, 1, said=1)], 139),
        ([ended(0, CRASHED, said=0)], 139),  # it crashed after its work was done
        ([ended(0, CRASHED, said=1)], 1),  # ... or after it had failed
        # What torchrun ended because of another decides nothing.
        ([ended(0, TERMINATED, order=1), ended(1, 1, said=1)], 1),
        ([ended(0, KILLED, at_s=130.0, order=1), ended(1, 2, said=2)], 2),
        ([ended(0, said=75), ended(1, 1, said=1)], 1),
        ([ended(0, TERMINATED), ended(1, TERMINATED, order=1)], 143),
    ],
)
def test_the_worst_end_decides(ranks: list[RankEnd], code: int) -> None:
    assert exit_code(JobEnd(tuple(ranks), agent_code=1 if code else 0), is_script=False) == code


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([ended(0, 3, order=1), ended(1, 77)], 77),
        ([ended(0, 1), ended(1, KILLED, order=1)], 1),
        ([ended(0, TERMINATED), ended(1, 5, order=1)], 5),
    ],
)
def test_the_first_failed_rank_of_a_script_decides(ranks: list[RankEnd], code: int) -> None:
    assert exit_code(JobEnd(tuple(ranks), agent_code=1), is_script=True) == code


def test_of_ranks_that_are_as_bad_the_first_by_its_own_clock_decides() -> None:
    ranks = [ended(0, 1, said=1, at_s=100.2), ended(1, 1, said=1, at_s=100.1, order=1)]
    decider = deciding(ranks, is_script=False)
    assert decider is not None
    assert decider.rank == 1


@pytest.mark.parametrize(("agent_code", "code"), [(0, 0), (1, 1), (-9, 137)])
def test_without_word_of_any_rank_the_agent_decides(agent_code: int, code: int) -> None:
    assert exit_code(JobEnd((), agent_code), is_script=False) == code


def test_what_is_left_is_read_together(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(3, 1), failure(2, TERMINATED)])
    write_outcome(tmp_path, RankOutcome(3, 1, "ValueError: boom", "Traceback\nValueError: boom"))
    end = read_end(tmp_path, agent_code=1)
    assert [(rank.rank, rank.local_rank, rank.pid, rank.exit_code) for rank in end.ranks] == [
        (2, 0, 42, 143),
        (3, 1, 43, 1),
    ]
    assert exit_code(end, is_script=False) == 1


def test_what_ranks_said_before_a_restart_does_not_count(tmp_path: Path) -> None:
    leave(tmp_path, restart=1)
    write_outcome(tmp_path, RankOutcome(2, 1, "first try", restart=0))
    write_outcome(tmp_path, RankOutcome(3, 0, restart=1))
    assert set(read_outcomes(tmp_path, 1)) == {3}
    assert exit_code(read_end(tmp_path, agent_code=0), is_script=False) == 0


def test_a_damaged_or_missing_report_is_no_reason_to_fail(tmp_path: Path) -> None:
    assert read_end(tmp_path, agent_code=-9).ranks == ()
    for name in ("agent.json", "logs.json", "outcome_0.json"):
        (tmp_path / name).write_text('{"rank')
    assert exit_code(read_end(tmp_path, agent_code=-9), is_script=False) == 137


def verdict(rank: int) -> Verdict:
    return Verdict(rank, 40 + rank, "stuck", 21.0, Beat(rank, 0, 40 + rank, 0.0, 0.0, 11, 40, "rollout", ""))


def test_a_rank_that_the_launcher_killed_decides_with_code_1(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(2, 1), failure(3, KILLED)])
    write_outcome(tmp_path, RankOutcome(2, 1, "lost another rank in the exchange of moments"))
    end = read_end(tmp_path, 1, {3: verdict(3)})
    decider = deciding(end.ranks, is_script=False)
    assert decider is not None and (decider.rank, decider.killed_by) == (3, 0)
    assert exit_code(end, is_script=False) == 1


def test_a_rank_that_was_told_to_end_is_not_the_cause() -> None:
    told = RankEnd(0, 0, 1, RankOutcome(0, 1, FOLLOWS, time_s=99.0), failed_at_s=99.0)
    decider = deciding([told, ended(1, 1, said=1)], is_script=False)
    assert decider is not None and decider.rank == 1
    assert deciding([told], is_script=False) is told


def test_who_lost_another_rank_is_not_the_cause_even_if_it_says_so_first() -> None:
    lost = RankEnd(0, 0, 1, RankOutcome(0, 1, "lost another rank in the exchange of moments", time_s=99.0))
    decider = deciding([lost, ended(1, 1, said=1, at_s=100.0)], is_script=False)
    assert decider is not None and decider.rank == 1


@pytest.mark.parametrize("code", [1, 2])
def test_who_lost_a_rank_that_was_refused_has_not_failed(code: int) -> None:
    lost = RankEnd(1, 0, 1, RankOutcome(1, 1, "lost another rank in the exchange of JAX's service", time_s=101.0))
    decider = deciding([ended(0, 0, said=code, at_s=100.0), lost], is_script=False)
    assert decider is not None and (decider.rank, decider.exit_code) == (0, code)


def test_what_ranks_beat_last_is_known_unless_it_is_of_another_start(tmp_path: Path) -> None:
    leave(tmp_path, restart=1, failures=[failure(2, KILLED), failure(3, KILLED)])
    beats.open_beats(tmp_path, 2, 1)
    beats.at_iteration(7)
    beats.open_beats(tmp_path, 3, 0)
    beats.close_beats()
    here, before = read_end(tmp_path, 1).ranks
    assert here.beat is not None and here.beat.iteration == 7
    assert before.beat is None


def test_an_agent_that_was_killed_has_still_told_of_ranks_that_ended(tmp_path: Path) -> None:
    leave(tmp_path)
    (tmp_path / "agent.json").unlink()
    (tmp_path / "exits_0.json").write_text(json.dumps([exited(3, KILLED, 100.0)]))
    end = read_end(tmp_path, -9)
    assert [(rank.rank, rank.pid, rank.killed_by) for rank in end.ranks] == [(3, 43, 9)]
    assert exit_code(end, is_script=False) == 137


def test_an_earlier_start_of_the_ranks_can_be_told(tmp_path: Path) -> None:
    leave(tmp_path, restart=0)
    first = read_attempt_logs(tmp_path)
    (tmp_path / "exits_0.json").write_text(json.dumps([exited(2, 3, 100.0)]))
    leave(tmp_path, restart=1, failures=[failure(3, 5)])
    assert [(rank.rank, rank.exit_code) for rank in read_end(tmp_path, 1, logs=first).ranks] == [(2, 3)]
    assert [(rank.rank, rank.exit_code) for rank in read_end(tmp_path, 1).ranks] == [(3, 5)]


def test_when_the_first_rank_failed(tmp_path: Path) -> None:
    write_outcome(tmp_path, RankOutcome(2, 75, time_s=90.0))
    assert first_failure_s(tmp_path, 0) is None
    (tmp_path / "exits_0.json").write_text(json.dumps([exited(2, 0, 95.0), exited(3, KILLED, 100.0)]))
    assert first_failure_s(tmp_path, 0) == 100.0
    write_outcome(tmp_path, RankOutcome(2, 1, "words", time_s=97.0))
    assert first_failure_s(tmp_path, 0) == 97.0
    assert first_failure_s(tmp_path, 1) is None


def test_the_agent_says_when_it_goes_to_meet_the_others_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []

    def look() -> list[bool]:
        return [is_meeting(tmp_path, restart) for restart in (0, 1)]

    monkeypatch.setattr(LocalElasticAgent, "__init__", lambda self: None)
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda self, group: seen.append(look()))
    monkeypatch.setenv(START, "")
    kind: Any = agent_class(tmp_path, {})
    agent = kind()
    handler = SimpleNamespace(get_backend=lambda: "c10d")
    agent._worker_group = SimpleNamespace(
        spec=SimpleNamespace(rdzv_handler=handler, max_restarts=3), group_rank=0, group_world_size=1
    )
    agent._remaining_restarts = 3

    def meet() -> list[bool]:
        agent._worker_group.store = HashStore()
        agent._rendezvous(agent._worker_group)
        return look()

    assert meet() == [False, False]
    assert meet() == [False, False]  # for a node that came or went: the ranks run under the same number
    agent._remaining_restarts -= 1
    assert meet() == [True, False]  # after a failure
    agent._remaining_restarts -= 1
    meet()
    assert seen == [[False, False], [True, False], [True, False], [True, True]]


def test_who_ended_well_before_others_failed(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(2, 1)], exits=[exited(2, 1, 100.0), exited(3, 0, 100.2)])
    assert [end.rank for end in ended_early(read_end(tmp_path, 1).ranks)] == [3]
    leave(tmp_path, exits=[exited(2, 0, 100.0), exited(3, 0, 100.2)])
    assert ended_early(read_end(tmp_path, 0).ranks) == []


def test_lines_are_followed_whole_and_with_their_rank(tmp_path: Path) -> None:
    said: list[tuple[str, bool]] = []
    follower = Follower(tmp_path, (0, 3), lambda line, to_stderr: said.append((line, to_stderr)))
    follower.follow()  # the ranks have not started yet
    leave(tmp_path)
    log = tmp_path / "1.log"
    log.write_bytes(b"one\ntw")
    follower.follow()
    with log.open("ab") as file:
        file.write("o\nzürich".encode())
        file.flush()
        follower.follow()
        assert said == [("[rank 3] one", True), ("[rank 3] two", True)]
        file.write(b"\xff")
    follower.follow(to_the_end=True)
    assert said[-1] == ("[rank 3] zürich�", True)


def test_the_end_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path, 3) == []
    assert last_lines(None, 3) == []
    path.write_text("x" * 100_000 + "\na\nb\n\n")
    assert last_lines(path, 2) == ["a", "b"]
