"""What a launch is waiting for, said when nothing has been heard for a while."""

import time
from collections.abc import Callable

from lockstep.core.outcome import has_joined, read_pid
from lockstep.core.process_control import environment_of
from lockstep.launch.logs import Say, read_attempt_logs
from lockstep.launch.plan import Plan

FIRST_S = 30.0
"""Silence after which the user is told."""
AGAIN_S = 60.0
_LOOK_S = 1.0


class Waiting:
    """Watches the ranks of this node start and join, and says what is missing when nothing moves.

    Args:
        plan: of the launch.
        say: shows a line.
        clock: in seconds.
    """

    def __init__(self, plan: Plan, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan = plan
        self._say = say
        self._clock = clock
        self._began_s = clock()
        self._next_look_s = self._began_s + _LOOK_S
        self._stage: object = "nodes"
        self._next_line_s = self._began_s + FIRST_S
        self._is_over = False

    def look(self) -> None:
        """Say what is being waited for, if it is time to."""
        now_s = self._clock()
        if self._is_over or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        stage, line = self._missing()
        if line is None:
            self._is_over = True
            return
        if stage != self._stage:
            self._stage = stage  # something has moved
            self._next_line_s = max(self._next_line_s, now_s + FIRST_S)
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + AGAIN_S
            self._say(f"lockstep: after {now_s - self._began_s:.0f} s still waiting: {line}", True)

    def _missing(self) -> tuple[object, str | None]:
        """Return how far this node has come and what is missing, None when nothing is that can be seen from here."""
        plan = self._plan
        logs = read_attempt_logs(plan.attempt_dir)
        if not logs.ranks:
            return "nodes", self._nodes_missing()
        if plan.work.is_script:  # which need not join anything
            return "script", None
        pids = {log.rank: read_pid(plan.attempt_dir, log.rank) for log in logs.ranks}
        late = [str(rank) for rank, pid in pids.items() if pid is None]
        if late:
            return len(late), f"rank{'s' if len(late) > 1 else ''} {', '.join(late)} of this node to start"
        environment = next((environment_of(pid) for pid in pids.values() if pid is not None), {})
        is_alone = plan.world_size == 1 or environment.get("WORLD_SIZE") == "1"  # an elastic job may be on one node
        if is_alone or any(has_joined(plan.attempt_dir, rank) for rank in pids):
            return "joined", None
        host, port = environment.get("MASTER_ADDR", "?"), environment.get("MASTER_PORT", "?")
        return "ranks", f"the ranks of this node have started and are to meet all others at {_at(host, port)}"

    def _nodes_missing(self) -> str:
        rendezvous = self._plan.rendezvous
        if rendezvous.endpoint is None:
            return "torchrun's agent is to start the ranks of this node"
        what = "the nodes have not met" if rendezvous.num_nodes > 1 else "this node has not found its meeting point"
        launchers = "are all launchers up, or " if rendezvous.num_nodes > 1 else ""
        return f"{what} at {rendezvous.endpoint}; {launchers}is something else listening there?"


def _at(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
