"""lockstep: train one policy in batched simulation on every device you have, and every rank stays in step.

Names are imported when they are first used: ``import lockstep`` loads neither torch nor a simulator.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.session.make_config import make_config
    from lockstep.session.make_env import make_env
    from lockstep.session.play import play
    from lockstep.session.policy import Policy, load_policy
    from lockstep.session.train import Outcome, train

__all__ = ["Outcome", "Policy", "load_policy", "make_config", "make_env", "play", "train"]

_HOMES = {
    "Outcome": "lockstep.session.train",
    "Policy": "lockstep.session.policy",
    "load_policy": "lockstep.session.policy",
    "make_config": "lockstep.session.make_config",
    "make_env": "lockstep.session.make_env",
    "play": "lockstep.session.play",
    "train": "lockstep.session.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
