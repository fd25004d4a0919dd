"""Calls on several CPU devices of one process, which must not overtake one another.

JAX returns from a call before it is done. A process with several CPU devices computes on them, and starts later calls
on them, in the same threads: as many as there are devices or, if that is more, cores. A device takes up to 32 calls
that are not done. The start of the next one waits, and keeps its thread from a collective that needs them all; after
40 s XLA ends the process (``Termination timeout for all reduce``). With ``jax_cpu_enable_async_dispatch`` off it is
the same, since what runs on several devices is started so in any case (JAX 0.10.2).
"""

from collections import Counter
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.core import beats


def must_wait(mesh: Mesh) -> bool:
    """Return whether each call is to be waited for: the same on all processes, as is what they then wait for."""
    devices = list(mesh.devices.flat)
    is_cpu = all(device.platform == "cpu" for device in devices)
    return is_cpu and max(Counter(device.process_index for device in devices).values()) > 1


def waited(result: Any) -> Any:
    """Return what a call has returned once it is there; what is only traced is there."""
    with beats.exchange(beats.DEVICE):
        return jax.block_until_ready(result)
