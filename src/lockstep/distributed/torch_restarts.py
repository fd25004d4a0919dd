"""When torchrun's agent starts the ranks of this node again, and what it tells them about it.

torchrun's own agent counts restarts node by node, lets ranks look for one another under that number, and knows no end
that a restart can't mend. Here the agents of all nodes agree, whenever they have met, on the number of starts and of
failures, and on an id that no other launch has; and none starts ranks again after an end that is final: a refusal (exit
code 2), or one that the attempt folder says is final.
"""

import contextlib
import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lockstep.core.outcome import (
    FOLLOWS,
    LOST_A_RANK,
    forget_start,
    is_final,
    read_outcomes,
    read_run,
    read_verdicts,
)
from lockstep.core.process_control import signal_name
from lockstep.distributed.topology import START, Start

Exits = Mapping[int, Mapping[str, Any]]
"""How ranks of this node ended by themselves, by local rank: ``rank``, ``exit_code``, ``time_s``."""

_FINAL = "lockstep/final"
_AGREE_S = 300.0
"""How long an agent may take to stop its ranks after those of another node have failed, and to meet again."""
_POLL_S = 0.1


class EndedElsewhereError(RuntimeError):
    """The agent of another node has ended the job."""


def agent_class(attempt_dir: Path, exits: Exits) -> type[LocalElasticAgent]:
    """Return torchrun's agent with the rules above.

    Args:
        attempt_dir: where the ranks of this node leave word.
        exits: of the running start; somebody else fills it.
    """

    class Agent(_Agent):
        _attempt_dir = attempt_dir
        _exits = exits

    return Agent


class _Agent(LocalElasticAgent):
    _attempt_dir: Path
    _exits: Exits

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._launch_id = ""
        self._num_starts = 0
        self._restart_of_last_start = -1
        self._last_failure = ""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler = worker_group.spec.rdzv_handler
        if hasattr(handler, "_bootstrap_store_info"):
            # Where ranks meet is kept from the round before, although another node may be the first now (torch 2.13).
            handler._bootstrap_store_info = None
        # From here on it may take minutes until the others are there; without this the launcher takes it for a hang.
        meeting = self._attempt_dir / f"meeting_{self._restart_of_last_start}"
        with contextlib.suppress(OSError):
            meeting.touch()
        super()._rendezvous(worker_group)
        start = self._agree(worker_group)
        if start.num_failures == self._restart_of_last_start:
            forget_start(self._attempt_dir, start.num_failures)
            meeting.unlink(missing_ok=True)
        self._restart_of_last_start = start.num_failures
        self._remaining_restarts = max(worker_group.spec.max_restarts - start.num_failures, 0)
        self._launch_id, self._num_starts = start.launch_id, start.number + 1
        self._last_failure = ""  # all have heard of it; the next start may have another reason, or none
        os.environ[START] = json.dumps(asdict(start))  # the ranks inherit it

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED and self._makes_room(worker_group):
            return RunResult(state=WorkerState.HEALTHY)  # whereupon they start again, with the nodes that wait
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._last_failure = reason(self._attempt_dir, self._num_restarts(), self._exits)
            if self._must_end(worker_group.store):
                self._remaining_restarts = 0
            elif _num_waiting(worker_group):
                # They lost ranks that another agent had stopped: the one that saw the failure counts it.
                return RunResult(state=WorkerState.HEALTHY)
        return result

    def _num_restarts(self) -> int:
        """Return what the ranks know as TORCHELASTIC_RESTART_COUNT."""
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _makes_room(self, worker_group: WorkerGroup) -> bool:
        """Return whether the ranks saved and stopped only because other nodes wait to take part."""
        if not _num_waiting(worker_group) or is_final(self._attempt_dir):
            return False
        return any(each.status == "preempted" for each in self._outcomes().values())

    def _must_end(self, store: Store | None) -> bool:
        """Return whether a failure is final, here or on another node, and let the other nodes know."""
        refused = any(each.status == "refused" for each in self._outcomes().values())
        if store is None:
            return refused or is_final(self._attempt_dir)
        with contextlib.suppress(DistError):  # a store that has gone tells nobody anything
            if refused or is_final(self._attempt_dir):
                store.set(_FINAL, "1")
            return bool(store.check([_FINAL]))
        return refused or is_final(self._attempt_dir)

    def _outcomes(self) -> dict[int, Any]:
        return dict(read_outcomes(self._attempt_dir, self._num_restarts()))

    def _agree(self, worker_group: WorkerGroup) -> Start:
        """Return what the agents of all nodes make of what each of them knows."""
        store = cast(Store, worker_group.store)
        # Nodes that find each other have a store for each round, those that are named one for the whole job.
        is_static = worker_group.spec.rdzv_handler.get_backend() == "static"
        key = f"lockstep/start_{self._num_starts if is_static else 0}"
        own = {
            "launch_id": self._launch_id,
            "job": os.environ.get("LOCKSTEP_JOB") or uuid.uuid4().hex,
            "num_starts": self._num_starts,
            "num_failures": self._num_restarts(),
            "last_failure": self._last_failure,
            "run_path": str(read_run(self._attempt_dir) or ""),
        }
        store.set(f"{key}/{worker_group.group_rank}", json.dumps(own))
        keys = [f"{key}/{rank}" for rank in range(cast(int, worker_group.group_world_size))]
        _wait(store, keys)
        return merge([json.loads(store.get(each)) for each in keys])


def merge(nodes: list[dict[str, Any]]) -> Start:
    """Return what the agents agree on, of what each says, in the order of nodes."""
    reasons = [each["last_failure"] for each in nodes if each["last_failure"]]
    return Start(
        launch_id=next((each["launch_id"] for each in nodes if each["launch_id"]), nodes[0]["job"]),
        number=max(each["num_starts"] for each in nodes),
        num_failures=max(each["num_failures"] for each in nodes),
        last_failure=next((each for each in reasons if not _follows(each)), next(iter(reasons), "")),
        run_path=next((each["run_path"] for each in nodes if each["run_path"]), ""),
    )


def reason(attempt_dir: Path, restart: int, exits: Exits) -> str:
    """Return why the ranks of this node failed, in one line: the first that was killed, else the first that says so.

    Of one that the launcher has killed counts why. What follows from another rank's end comes last.
    """
    verdicts = read_verdicts(attempt_dir, restart)
    guilty = [rank for rank, words in verdicts.items() if words]
    if guilty:
        times_s = {each["rank"]: each["time_s"] for each in exits.values()}
        first_rank = min(guilty, key=lambda rank: (times_s.get(rank, math.inf), rank))
        return f"rank {first_rank} {verdicts[first_rank]}"
    killed = [each for each in exits.values() if each["exit_code"] < 0 and each["rank"] not in verdicts]
    if killed:
        first = min(killed, key=lambda each: each["time_s"])
        return f"rank {first['rank']} was killed by {signal_name(-first['exit_code'])}"
    said = [each for each in read_outcomes(attempt_dir, restart).values() if each.status in ("failed", "refused")]
    if said:
        outcome = min(said, key=lambda each: (_follows(each.message), each.time_s))
        words = outcome.message or next(iter(reversed(outcome.traceback.strip().splitlines())), "")
        if _follows(words):
            words = words.partition(" (")[0]  # what follows is gloo's
        return f"rank {outcome.rank}: {words or f'ended with exit code {outcome.exit_code}'}"
    failed = sorted((each for each in exits.values() if each["exit_code"]), key=lambda each: each["time_s"])
    return f"rank {failed[0]['rank']} ended with exit code {failed[0]['exit_code']}" if failed else ""


def _follows(words: str) -> bool:
    """Return whether a rank says that it failed because another had."""
    return LOST_A_RANK in words or FOLLOWS in words


def _wait(store: Store, keys: list[str]) -> None:
    """Wait until a store has all keys, in steps, so that a signal is heard and another node's end is seen."""
    deadline = time.monotonic() + _AGREE_S
    try:
        while not store.check(keys):
            if store.check([_FINAL]):
                raise EndedElsewhereError("another node has ended the job")
            if time.monotonic() > deadline:
                raise EndedElsewhereError(f"another node has not started its ranks again within {_AGREE_S:.0f} s")
            time.sleep(_POLL_S)
    except DistError as error:
        raise EndedElsewhereError("the node that keeps the job's store has ended") from error


def _num_waiting(worker_group: WorkerGroup) -> int:
    with contextlib.suppress(Exception):  # whatever a rendezvous raises when its store has gone
        return int(worker_group.spec.rdzv_handler.num_nodes_waiting())
    return 0
