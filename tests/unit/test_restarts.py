"""When torchrun's agent starts ranks again, and what the agents of several nodes agree on."""

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lockstep.core.outcome import (
    FOLLOWS,
    RankOutcome,
    forget_launch,
    forget_start,
    has_failed,
    mark_final,
    note_failure,
    note_verdict,
    read_outcomes,
    read_verdicts,
    write_outcome,
    write_pid,
)
from lockstep.distributed import torch_restarts
from lockstep.distributed.topology import START, Start
from lockstep.distributed.torch_restarts import EndedElsewhereError, agent_class

MAX_RESTARTS = 3


class Handler:
    """A rendezvous with nodes that wait."""

    def __init__(self, num_waiting: int = 0, backend: str = "c10d") -> None:
        self.num_waiting, self.backend = num_waiting, backend
        self._bootstrap_store_info: object = "of the round before"

    def num_nodes_waiting(self) -> int:
        return self.num_waiting

    def get_backend(self) -> str:
        return self.backend


def agent_on(
    folder: Path, store: Any, handler: Handler | None = None, node: int = 0, num_nodes: int = 1, restarts: int = 0
) -> Any:
    """Return an agent whose ranks run already."""
    spec = SimpleNamespace(rdzv_handler=handler or Handler(), max_restarts=MAX_RESTARTS)
    kind: Any = agent_class(folder, {})
    agent = kind()
    agent._worker_group = SimpleNamespace(spec=spec, store=store, group_rank=node, group_world_size=num_nodes)
    agent._remaining_restarts = MAX_RESTARTS - restarts
    return agent


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalElasticAgent, "__init__", lambda self: None)
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda self, group: None)
    monkeypatch.setenv("LOCKSTEP_JOB", "one")
    monkeypatch.setenv(START, "")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[WorkerState], None]:
    """Decides what torchrun's own agent sees of the ranks."""

    def see(state: WorkerState) -> None:
        monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: RunResult(state=state))

    return see


@pytest.mark.parametrize(
    ("state", "exit_code", "num_waiting", "is_final", "then", "may_restart"),
    [
        (WorkerState.HEALTHY, 0, 1, False, WorkerState.HEALTHY, True),
        (WorkerState.SUCCEEDED, 0, 0, False, WorkerState.SUCCEEDED, True),
        # Saved and stopped since others wait: torchrun starts ranks again that are healthy while others wait.
        (WorkerState.SUCCEEDED, 75, 1, False, WorkerState.HEALTHY, True),
        (WorkerState.SUCCEEDED, 75, 0, False, WorkerState.SUCCEEDED, True),
        (WorkerState.SUCCEEDED, 0, 1, False, WorkerState.SUCCEEDED, True),
        (WorkerState.SUCCEEDED, 130, 1, False, WorkerState.SUCCEEDED, True),
        (WorkerState.SUCCEEDED, 75, 1, True, WorkerState.SUCCEEDED, True),  # it is the launcher that was asked to stop
        (WorkerState.FAILED, 1, 0, False, WorkerState.FAILED, True),
        (WorkerState.FAILED, 1, 1, False, WorkerState.HEALTHY, True),
        (WorkerState.FAILED, 2, 0, False, WorkerState.FAILED, False),
        (WorkerState.FAILED, 2, 1, False, WorkerState.FAILED, False),
        (WorkerState.FAILED, 1, 0, True, WorkerState.FAILED, False),
        (WorkerState.UNHEALTHY, 1, 0, True, WorkerState.UNHEALTHY, False),
    ],
)
def test_which_ends_lead_to_another_start(
    tmp_path: Path,
    seen: Callable[[WorkerState], None],
    state: WorkerState,
    exit_code: int,
    num_waiting: int,
    is_final: bool,
    then: WorkerState,
    may_restart: bool,
) -> None:
    seen(state)
    write_outcome(tmp_path, RankOutcome(1, 2 if exit_code == 75 else 75, restart=0))  # of another start
    write_outcome(tmp_path, RankOutcome(0, exit_code, restart=1))
    if is_final:
        mark_final(tmp_path)
    agent = agent_on(tmp_path, HashStore(), Handler(num_waiting), restarts=1)
    assert agent._monitor_workers(agent._worker_group).state == then
    assert agent._remaining_restarts == (MAX_RESTARTS - 1 if may_restart else 0)


def test_what_is_final_on_one_node_is_final_on_all(tmp_path: Path, seen: Callable[[WorkerState], None]) -> None:
    seen(WorkerState.FAILED)
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    store = HashStore()
    agents = [agent_on(folder, store, node=node, num_nodes=2) for node, folder in enumerate((here, there))]
    write_outcome(here, RankOutcome(0, 2))
    for agent in agents:
        agent._monitor_workers(agent._worker_group)
    assert [agent._remaining_restarts for agent in agents] == [0, 0]
    # One that has started its ranks again already does not wait for the other for ever.
    with pytest.raises(EndedElsewhereError, match="another node has ended the job"):
        agents[1]._agree(agents[1]._worker_group)


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_agents_agree_whenever_they_meet(tmp_path: Path, backend: str) -> None:
    rounds = [HashStore()] * 3 if backend == "static" else [HashStore() for _ in range(3)]
    agents = [agent_on(tmp_path, None, Handler(0, backend), node, num_nodes=2) for node in range(2)]
    for number, failures in enumerate((0, 1, 1)):
        for agent in agents:
            agent._worker_group.store = rounds[number]
        agents[0]._remaining_restarts = MAX_RESTARTS - failures  # it is the only one that has seen the failure
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda agent: agent._rendezvous(agent._worker_group), agents))
        assert os.environ[START] == json.dumps(asdict(Start("one", number, failures)))
        assert [agent._remaining_restarts for agent in agents] == [MAX_RESTARTS - failures] * 2
        assert [(agent._launch_id, agent._num_starts) for agent in agents] == [("one", number + 1)] * 2
    assert [agent._worker_group.spec.rdzv_handler._bootstrap_store_info for agent in agents] == [None, None]


def test_a_reason_is_given_once(tmp_path: Path) -> None:
    agent = agent_on(tmp_path, HashStore())
    agent._last_failure = "rank 1: no luck"
    given = []
    for _ in range(2):
        agent._worker_group.store = HashStore()
        agent._rendezvous(agent._worker_group)
        given.append(json.loads(os.environ[START])["last_failure"])
    assert given == ["rank 1: no luck", ""]


def test_only_a_start_under_the_same_number_clears_what_was_left(tmp_path: Path) -> None:
    agent = agent_on(tmp_path, None)

    def what_stays() -> list[bool]:
        for restart in (0, 1):
            note_failure(tmp_path, restart)
        agent._worker_group.store = HashStore()
        agent._rendezvous(agent._worker_group)
        return [has_failed(tmp_path, restart) for restart in (0, 1)]

    assert what_stays() == [True, True]
    assert what_stays() == [False, True]  # for a node that came or went
    agent._remaining_restarts -= 1
    assert what_stays() == [True, True]  # after a failure, of which the launcher may still have to tell
    assert what_stays() == [True, False]


# --- what the agents agree on ----------------------------------------------------------------------------------------


def node(
    job: str, launch: str = "", starts: int = 0, failures: int = 0, reason: str = "", run: str = ""
) -> dict[str, Any]:
    told = {"launch_id": launch, "job": job, "num_starts": starts, "num_failures": failures, "last_failure": reason}
    return told | {"run_path": run}


def test_agents_agree_on_one_launch_and_on_the_larger_numbers() -> None:
    assert torch_restarts.merge([node("a"), node("b")]) == Start("a", 0, 0)
    # A node that comes later, and is the first now, knows nothing of the launch.
    assert torch_restarts.merge([node("c"), node("a", "a", 2, 1, run="/x")]) == Start("a", 2, 1, run_path="/x")
    assert torch_restarts.merge([node("a", "a", 3, 1), node("b", "a", 3, 2)]) == Start("a", 3, 2)


def test_agents_blame_the_node_where_a_failure_began() -> None:
    lost, own = "rank 0: lost another rank in the exchange of gradients", "rank 2: LookupError: no luck"
    assert torch_restarts.merge([node("a", reason=lost), node("b", reason=own)]).last_failure == own
    assert torch_restarts.merge([node("a", reason=lost), node("b")]).last_failure == lost


def exit_of(rank: int, code: int, time_s: float) -> Mapping[str, Any]:
    return {"rank": rank, "exit_code": code, "time_s": time_s}


def test_the_reason_of_a_failure_is_what_came_first(tmp_path: Path) -> None:
    def say(rank: int, message: str, traceback: str = "", time_s: float = 0.0, restart: int = 1) -> None:
        write_outcome(tmp_path, RankOutcome(rank, 1, message, traceback, restart, time_s))

    exits = {0: exit_of(0, 1, 2.0), 1: exit_of(1, 3, 1.0)}
    assert torch_restarts.reason(tmp_path, 1, {}) == ""
    assert torch_restarts.reason(tmp_path, 1, exits) == "rank 1 ended with exit code 3"
    say(0, "lost another rank in the exchange of x ([gloo says so])", time_s=1.0)
    say(2, f"{FOLLOWS}, and this one ended", time_s=2.0)
    assert torch_restarts.reason(tmp_path, 1, exits) == "rank 0: lost another rank in the exchange of x"
    say(3, "", "Traceback\n  somewhere\nLookupError: no luck\n", time_s=3.0)
    assert torch_restarts.reason(tmp_path, 1, exits) == "rank 3: LookupError: no luck"
    say(1, "the disk is full", time_s=2.5)
    assert torch_restarts.reason(tmp_path, 1, exits) == "rank 1: the disk is full"
    killed = exits | {2: exit_of(4, -9, 3.0), 3: exit_of(5, -11, 2.0)}
    assert torch_restarts.reason(tmp_path, 1, killed) == "rank 5 was killed by SIGSEGV"
    assert torch_restarts.reason(tmp_path, 2, {}) == ""  # those are of another start


def test_a_rank_that_the_launcher_has_killed_failed_for_the_reason_that_it_had(tmp_path: Path) -> None:
    exits = {0: exit_of(0, 1, 3.0), 1: exit_of(1, -9, 2.0), 2: exit_of(2, -9, 1.0)}
    note_verdict(tmp_path, 1, 2, "")  # it only did not end
    assert torch_restarts.reason(tmp_path, 1, exits) == "rank 1 was killed by SIGKILL"
    note_verdict(tmp_path, 1, 1, "was stopped by a signal")
    assert torch_restarts.reason(tmp_path, 1, exits) == "rank 1 was stopped by a signal"
    note_verdict(tmp_path, 1, 1, "")
    write_outcome(tmp_path, RankOutcome(0, 1, "the disk is full", restart=1))
    assert torch_restarts.reason(tmp_path, 1, exits) == "rank 0: the disk is full"
    forget_start(tmp_path, 1)
    assert read_verdicts(tmp_path, 1) == {}


def test_ranks_that_take_the_place_of_others_find_nothing_of_theirs(tmp_path: Path) -> None:
    write_pid(tmp_path, 0, 1)
    write_outcome(tmp_path, RankOutcome(0, 75, restart=1))
    for name in ("beat_0", "rank_0.joined", "exits_1.json", "logs.json"):
        (tmp_path / name).touch()
    note_failure(tmp_path, 0)
    note_failure(tmp_path, 1)
    mark_final(tmp_path)
    forget_start(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed_0", "final", "logs.json"]
    forget_launch(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed_0", "logs.json"]
    assert read_outcomes(tmp_path, 1) == {}
