"""lockstep: train one policy in batched simulation on every device you have, and every rank stays in step.

Names are imported when they are first used: ``import lockstep`` loads neither torch nor a simulator.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep import distributed
    from lockstep.session.env_faces import make_gymnasium_env, make_gymnasium_vector_env, make_rsl_rl_env
    from lockstep.session.export import Exported, export
    from lockstep.session.gymnasium_envs import register_gymnasium_envs
    from lockstep.session.init import Place, init
    from lockstep.session.make_config import make_config
    from lockstep.session.make_env import make_env
    from lockstep.session.play import play
    from lockstep.session.policy import Policy, load_policy
    from lockstep.session.runner import Runner
    from lockstep.session.train import Outcome, train

if os.environ.get("WORLD_SIZE", "1") != "1":
    # Each rank gets its own GPU before anything else has a chance to initialise CUDA.
    importlib.import_module("lockstep.distributed.isolation").isolate()

__all__ = [
    "Exported",
    "Outcome",
    "Place",
    "Policy",
    "Runner",
    "distributed",
    "export",
    "init",
    "load_policy",
    "make_config",
    "make_env",
    "make_gymnasium_env",
    "make_gymnasium_vector_env",
    "make_rsl_rl_env",
    "play",
    "register_gymnasium_envs",
    "train",
]

_HOMES = {
    "Exported": "lockstep.session.export",
    "Outcome": "lockstep.session.train",
    "Place": "lockstep.session.init",
    "Policy": "lockstep.session.policy",
    "Runner": "lockstep.session.runner",
    "export": "lockstep.session.export",
    "init": "lockstep.session.init",
    "load_policy": "lockstep.session.policy",
    "make_config": "lockstep.session.make_config",
    "make_env": "lockstep.session.make_env",
    "make_gymnasium_env": "lockstep.session.env_faces",
    "make_gymnasium_vector_env": "lockstep.session.env_faces",
    "make_rsl_rl_env": "lockstep.session.env_faces",
    "play": "lockstep.session.play",
    "register_gymnasium_envs": "lockstep.session.gymnasium_envs",
    "train": "lockstep.session.train",
}


def __getattr__(name: str) -> Any:
    if name == "distributed":
        return importlib.import_module("lockstep.distributed")
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
