"""The store that torchrun's agent keeps for a job, where the ranks of one start find one another."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lockstep.core.errors import RunError
from lockstep.distributed.timeouts import JOIN_TIMEOUT_S, seconds
from lockstep.distributed.topology import Topology, start_from_environment
from lockstep.distributed.wording import name_ranks

PREFIX = "lockstep"

_ARRIVED = f"{PREFIX}/arrived/{{}}"


def meet(topology: Topology) -> Store:
    """Return the job's store after every rank has reported in it.

    Raises:
        RunError: it can't be reached, or ranks are missing after LOCKSTEP_JOIN_TIMEOUT_S seconds; they are named.
    """
    timeout_s = seconds("LOCKSTEP_JOIN_TIMEOUT_S", JOIN_TIMEOUT_S)
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    # torchrun's agent keeps the store; without one rank 0 does.
    is_kept_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        whole = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            int(port),
            topology.world_size,
            is_master=topology.rank == 0 and not is_kept_elsewhere,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # it would not say who is missing
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RunError(
            f"rank {topology.rank} can't reach the job's store at {host}:{port} ({reason}); is rank 0 up, its address "
            "reachable from here, and the port free for it?"
        ) from error
    # The agent's store outlives a restart of the ranks, which must not meet those of before.
    store = PrefixStore(f"attempt_{start_from_environment().number}", whole)
    store.set(_ARRIVED.format(topology.rank), "1")
    deadline = time.monotonic() + timeout_s
    missing = without(store, _ARRIVED, range(topology.world_size))
    while missing:
        if time.monotonic() > deadline:
            raise RunError(
                f"{name_ranks(missing)} of {topology.world_size} did not start within {timeout_s:.0f} s; look at their "
                "logs, or raise LOCKSTEP_JOIN_TIMEOUT_S if they are only slow"
            )
        time.sleep(0.02)
        missing = without(store, _ARRIVED, missing)
    return store


def without(store: Store, key: str, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have no entry; all of them if the store has gone, as it does when its keeper gives up."""
    try:
        return [rank for rank in ranks if not store.check([key.format(rank)])]
    except dist.DistError:
        return list(ranks)


def announce(store: Store, key: str, text: str | None, timeout_s: float) -> str:
    """Return on every rank the text that rank 0 gives; the others give None, and wait for it.

    Raises:
        RunError: rank 0 has not given it in time.
    """
    if text is not None:
        store.set(f"{PREFIX}/{key}", text)
        return text
    try:
        store.wait([f"{PREFIX}/{key}"], timedelta(seconds=timeout_s))
        return str(store.get(f"{PREFIX}/{key}").decode())
    except (dist.DistError, RuntimeError) as error:
        raise RunError(f"rank 0 has not said within {timeout_s:.0f} s where its coordinator is; see its log") from error
