"""Gymnasium's registry with lockstep's tasks in it; to import this module is to put them there.

Gymnasium 1 looks for no plug-ins: an id is known once its package has been imported, or with the module before it, as
in ``gymnasium.make("lockstep.session.gymnasium_envs:lockstep/cartpole_balance-v0")``.
"""

from __future__ import annotations

import re

from lockstep.recipes.catalog import TASKS
from lockstep.session.env_faces import GYMNASIUM

NAMESPACE, VERSION = "lockstep", 0


def register_gymnasium_envs() -> list[str]:
    """Make every task known to ``gymnasium.make`` and ``make_vec``; return their ids, ``lockstep/<task>-v0``.

    Raises:
        UsageError: Gymnasium is not installed.
    """
    GYMNASIUM.require("Gymnasium's registry")
    import gymnasium

    # Gymnasium takes no other names; a package may have called a task anything.
    names = [task for task in TASKS if re.fullmatch(r"[\w.:-]+", task)]
    ids = {f"{NAMESPACE}/{task}-v{VERSION}": task for task in names}
    for env_id, task in ids.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(
                id=env_id,
                entry_point="lockstep.session.env_faces:make_gymnasium_env",
                vector_entry_point="lockstep.session.env_faces:make_gymnasium_vector_env",
                kwargs={"task": task, "seed": None},
            )
    return list(ids)


register_gymnasium_envs()
