"""A time limit on the first exchange of a job: inside it nobody can raise, so the process ends, in words."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lockstep.distributed.wording import name_ranks


@contextmanager
def deadline(timeout_s: float, world_size: int, silent: Callable[[], Sequence[int]], mend: str) -> Iterator[None]:
    """End the process if what happens in this context is not over in time.

    Args:
        timeout_s: seconds.
        world_size: how many ranks take part.
        silent: returns those that have not come through.
        mend: what the user can do.
    """
    over = threading.Event()

    def watch() -> None:
        if over.wait(timeout_s):
            return
        print(  # noqa: T201
            f"lockstep: error: the first exchange did not end within {timeout_s:.0f} s: {name_ranks(silent())} of "
            f"{world_size} did not answer; is there a firewall between the hosts? {mend}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    thread = threading.Thread(target=watch, name="lockstep-join", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
