"""The learners there are, ours and other people's: by library, framework and algorithm. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.errors import UsageError, nearest
from lockstep.core.registry import Registry

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig

OWN = "lockstep"
"""The library whose learners are lockstep's own."""
_ONE_PROCESS = "run it with one process"


@dataclass(frozen=True)
class Library:
    """A library of learners."""

    algorithms: Mapping[str, Mapping[str, str]]
    """By framework, the algorithms it has for it: why one can't train on several ranks, "" if it can."""
    learners: Mapping[str, str]
    """By framework, the import string of what runs its learners."""
    distribution: str = ""
    """By which pip knows it; "" for what is always there."""
    extra: str = ""
    """Of lockstep, that installs it."""
    versions: tuple[str, str] = ("0", "")
    """The first version that will do, and the first that is not known to."""

    @property
    def range(self) -> str:
        """The versions as pip writes them."""
        return f">={self.versions[0]},<{self.versions[1]}"


LIBRARIES: Registry[Library] = Registry("rl_library")

LIBRARIES.register(
    OWN,
    Library(
        algorithms={"torch": {"ppo": ""}, "jax": {"ppo": "", "sac": ""}},
        learners={"torch": "lockstep.session.runner:LEARNERS", "jax": "lockstep.session.jax_session:ALGORITHMS"},
    ),
)
LIBRARIES.register(
    "rsl_rl",
    Library(
        algorithms={"torch": {"ppo": "", "distillation": ""}},
        learners={"torch": "lockstep.adapters.rsl_rl.learner:RslRlLearner"},
        distribution="rsl-rl-lib",
        extra="rsl-rl",
        versions=("5.5.1", "6"),
    ),
)
LIBRARIES.register(
    "rl_games",
    Library(
        algorithms={
            "torch": {
                "ppo": "",
                "sac": "its SAC exchanges nothing between ranks, each of which would train a policy of its own",
            }
        },
        learners={"torch": "lockstep.adapters.rl_games.learner:RlGamesLearner"},
        distribution="rl-games",
        extra="rl-games",
        versions=("1.6.5", "1.7"),
    ),
)
LIBRARIES.register(
    "skrl",
    Library(
        algorithms={
            "torch": {
                "ppo": "",
                "rpo": "",
                "a2c": "",
                "sac": "",
                "td3": "",
                "ddpg": "",
                "dqn": "",
                "ddqn": "",
                "trpo": "its TRPO computes the policy's step on each rank from that rank's samples alone",
                "cem": "its CEM picks the best episodes of each rank alone and shares nothing",
            },
            "jax": {"ppo": "", "sac": ""},
        },
        learners={
            "torch": "lockstep.adapters.skrl.torch_learner:SkrlLearner",
            "jax": "lockstep.adapters.skrl.jax_learner:SkrlLearner",
        },
        distribution="skrl",
        extra="skrl",
        versions=("2.1.1", "2.2"),
    ),
)
LIBRARIES.register(
    "sb3",
    Library(
        algorithms={
            "torch": dict.fromkeys(
                ("ppo", "sac", "td3"), "Stable-Baselines3 is made for one process and exchanges nothing"
            )
        },
        learners={"torch": "lockstep.adapters.sb3.learner:Sb3Learner"},
        distribution="stable-baselines3",
        extra="sb3",
        versions=("2.6", "3"),
    ),
)

_TABULAR = ("q_learning", "sarsa")


def library_of(config: TrainConfig) -> Library:
    """Return the library that a config trains with.

    Raises:
        UsageError: there is none of that name.
    """
    return LIBRARIES.get(config.rl_library)


def algorithms_of(rl_library: str = OWN) -> dict[str, tuple[str, ...]]:
    """Return by framework what a library has a learner for."""
    return {framework: tuple(known) for framework, known in LIBRARIES.get(rl_library).algorithms.items()}


def check_algorithm_name(algorithm: str) -> None:
    """Raise UsageError for an algorithm that another library has and that can't be made to fit any task here."""
    if algorithm in _TABULAR:
        raise UsageError(
            f"algorithm {algorithm} (of skrl) has a table of states, and the observations of tasks here are real "
            "numbers; use another one"
        )


def check_library(config: TrainConfig) -> None:
    """Check that a config's library is known, has what is asked of it, and is installed in a version that will do.

    Raises:
        UsageError: it has no such framework or algorithm, is missing or of another version; or a runner of the user's
            is asked for too, or settings of a library where there is none.
    """
    name, library = config.rl_library, library_of(config)
    if name != OWN and config.runner:
        raise UsageError(f"runner {config.runner} and rl_library {name} exclude each other; leave one of them out")
    if name == OWN and config.library:
        raise UsageError(
            f"library.{next(iter(config.library))} is a setting of another library, and rl_library is {OWN}, whose "
            "settings are agent.*; leave it out, or name the library with --rl_library"
        )
    if config.ml_framework not in library.algorithms:
        raise UsageError(
            f"ml_framework {config.ml_framework} is not available with rl_library {name}; use --ml_framework "
            f"{next(iter(library.algorithms))}"
        )
    _check_algorithm(config, library)
    _check_installed(name, library)


def require_several(config: TrainConfig, num_ranks: int) -> None:
    """Raise UsageError if an algorithm of another library can't be kept in step on so many ranks, with the reason."""
    reason = library_of(config).algorithms[config.ml_framework][config.algorithm]
    if reason and num_ranks > 1:
        raise UsageError(
            f"algorithm {config.algorithm} of rl_library {config.rl_library} can't train on {num_ranks} ranks: "
            f"{reason}; {_ONE_PROCESS}"
        )


def _check_algorithm(config: TrainConfig, library: Library) -> None:
    name, framework, algorithm = config.rl_library, config.ml_framework, config.algorithm
    known = library.algorithms[framework]
    if algorithm in known:
        return
    for other, algorithms in library.algorithms.items():
        if algorithm in algorithms:
            raise UsageError(
                f"algorithm {algorithm!r} is not available with ml_framework {framework}; use --ml_framework {other}"
            )
    raise UsageError(
        f"algorithm {algorithm!r} is not available{_others(algorithm, framework)}: rl_library {name} has "
        f"{', '.join(known)}{nearest(algorithm, known)}"
    )


def _others(algorithm: str, framework: str) -> str:
    others = [name for name in LIBRARIES if algorithm in LIBRARIES.get(name).algorithms.get(framework, {})]
    return f" (it is with --rl_library {' or '.join(others)})" if others else ""


def _check_installed(name: str, library: Library) -> None:
    if not library.distribution:
        return
    mend = f"install it with: pip install 'lockstep-rl[{library.extra}]'"
    try:
        found = importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            f"rl_library {name} needs {library.distribution}, which is not installed here; {mend}"
        ) from None
    first, end = library.versions
    if not _numbers(first) <= _numbers(found) < _numbers(end):
        raise UsageError(
            f"rl_library {name} needs {library.distribution} {library.range}, and {found} is installed; {mend}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (5, 5, 1) of 5.5.1rc1."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()
