"""What a process needs before it trains: memory that stays, enough of it, and a sensible number of threads."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

from lockstep.core.errors import RunError, UsageError
from lockstep.core.rng import stream_seed
from lockstep.distributed.cores import threads_per_rank
from lockstep.learn.config import PpoConfig

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig

# mallopt(3), malloc.h of the GNU C library
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT_BYTES = 1 << 30
SMALL_WIDTH = 128


def prepare(config: TrainConfig, rank: int) -> None:
    """Set up torch's threads, the C library's allocator and every random generator that is not ours for a training."""
    import torch

    seed_generators(config.seed, rank)
    keep_large_buffers()
    torch.set_num_threads(config.num_torch_threads or torch_threads(config, threads_per_rank()))


def torch_threads(config: TrainConfig, num_cores: int) -> int:
    """Return how many threads torch is given by itself, where a rank has so many cores."""
    agent = config.agent
    widths = [*agent.actor_hidden_dims, *agent.critic_hidden_dims]
    if isinstance(agent, PpoConfig) and agent.recurrent != "none":
        widths.append(agent.recurrent_hidden_dim)
    # Threads that wait for one another after every small layer gain nothing, and lose much on a busy machine.
    return 1 if max(widths, default=0) <= SMALL_WIDTH else num_cores


def seed_generators(seed: int, rank: int, iteration: int = 0) -> None:
    """Seed the generators of Python, numpy and torch by a hash of the run's seed, the global rank and the iteration.

    Our own streams are keyed by global env id; whatever else draws numbers gets a seed of its own on every rank. Not
    seed + rank: neighbouring seeds would share the generators of most ranks.
    """
    import torch

    torch.manual_seed(seed_plain_generators(seed, rank, iteration))


def seed_plain_generators(seed: int, rank: int, iteration: int = 0) -> int:
    """Seed the generators of Python and numpy as ``seed_generators`` does; return that seed."""
    import numpy

    own = stream_seed(seed, f"rank {rank} from iteration {iteration}")
    random.seed(own)
    numpy.random.seed(own % 2**32)  # noqa: NPY002 - other people's code draws from the global generator
    return own


def keep_large_buffers() -> bool:
    """Tell the C library to keep freed buffers of up to 1 GiB; return whether it took the advice.

    By default glibc maps every buffer above 32 MiB anew and returns memory at the heap's top, so each pass of an
    update pays for page faults that the next one pays again. Other C libraries have no ``mallopt``.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(option, KEPT_BYTES) for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD))


def check_memory(num_bytes: int, num_envs: int) -> None:
    """Refuse what this machine can't hold, before the system ends this or another process for want of memory.

    Raises:
        UsageError: more than all the memory there is.
    """
    total = psutil.virtual_memory().total
    if num_bytes > total:
        raise UsageError(
            f"{num_envs} envs need at least {num_bytes / 2**30:.0f} GiB of memory and this machine has "
            f"{total / 2**30:.0f} GiB; use fewer"
        )


@contextlib.contextmanager
def memory_errors_in_words(num_envs: int) -> Iterator[None]:
    """Turn an allocation that failed, on the host or on a GPU, into one line.

    Raises:
        RunError: instead of ``MemoryError`` and the frameworks' own errors.
    """
    try:
        yield
    except MemoryError:
        raise RunError(f"out of memory with {num_envs} envs; use fewer") from None
    except RuntimeError as error:
        # torch.OutOfMemoryError on a GPU; on the CPU torch raises a plain RuntimeError. JAX tells by the words alone.
        is_of_torch = type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
        if not is_of_torch and not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise RunError(f"out of memory with {num_envs} envs; use fewer, or smaller networks") from None
