"""Which rank this process is, for code of your own; answered from the launcher's variables, without torch."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lockstep.distributed.topology import from_environment

P = ParamSpec("P")
T = TypeVar("T")


def is_distributed() -> bool:
    """Return whether the job has more than one rank."""
    return get_world_size() > 1


def is_main_process() -> bool:
    """Return whether this is global rank 0; the only process of a job of one is."""
    return get_global_rank() == 0


def get_global_rank() -> int:
    """Return this process's number among all ranks of the job, 0 to ``get_world_size() - 1``.

    Raises:
        UsageError: the launcher's variables contradict one another; so do all functions of this module.
    """
    return from_environment().rank


def get_local_rank() -> int:
    """Return this process's number among the ranks of its node."""
    return from_environment().local_rank


def get_world_size() -> int:
    """Return how many ranks the job has, over all nodes; 1 without a launcher."""
    return from_environment().world_size


def main_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Let global rank 0 alone run a function; on the other ranks it does nothing and returns None.

    For what must happen once per job, such as writing a file. Ranks don't wait for one another, so the function must
    not call anything that all ranks take part in.
    """

    @functools.wraps(function)
    def on_main(*arguments: P.args, **named: P.kwargs) -> T | None:
        return function(*arguments, **named) if is_main_process() else None

    return on_main
