"""The learners there are, ours and other people's: by library, framework and algorithm. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.core.distributions import Distribution
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
    distribution: Distribution | None = None
    """None for what is always there."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Algorithms that it has and that are not offered here, on any number of ranks: why."""

    def require(self, asked_by: str) -> None:
        """Raise UsageError, naming ``asked_by``, unless it is installed in a version that will do."""
        if self.distribution is not None:
            self.distribution.require(asked_by)


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
        distribution=Distribution("rsl-rl-lib", "rsl-rl", at_least="5.5.1", below="6"),
    ),
)
LIBRARIES.register(
    "rl_games",
    Library(
        algorithms={"torch": {"ppo": ""}},
        refused={"sac": "its SAC exchanges nothing between ranks, each of which would train its own policy"},
        learners={"torch": "lockstep.adapters.rl_games.learner:RlGamesLearner"},
        distribution=Distribution("rl-games", "rl-games", at_least="1.6.5", below="1.7"),
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
        distribution=Distribution("skrl", "skrl", at_least="2.1.1", below="2.2"),
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
        distribution=Distribution("stable-baselines3", "sb3", at_least="2.6", below="3"),
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


def libraries_with(algorithm: str, frameworks: Iterable[str]) -> list[str]:
    """Return the libraries that have a learner of an algorithm for one of these frameworks."""
    return [name for name in LIBRARIES if any(algorithm in algorithms_of(name).get(each, ()) for each in frameworks)]


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
    if config.algorithm in library.refused:
        raise UsageError(
            f"algorithm {config.algorithm!r} of rl_library {name} is not offered: {library.refused[config.algorithm]}; "
            f"use {_others(config.algorithm, config.ml_framework) or 'another algorithm'}"
        )
    if config.ml_framework not in library.algorithms:
        raise UsageError(
            f"ml_framework {config.ml_framework} is not available with rl_library {name}; use --ml_framework "
            f"{next(iter(library.algorithms))}"
        )
    _check_algorithm(config, library)
    library.require(f"rl_library {name}")


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
    others = _others(algorithm, framework)
    elsewhere = f" (it is with {others})" if others else ""
    raise UsageError(
        f"algorithm {algorithm!r} is not available{elsewhere}: rl_library {name} has {', '.join(known)}"
        f"{nearest(algorithm, known)}"
    )


def _others(algorithm: str, framework: str) -> str:
    """Return the flag for the libraries that have a learner of an algorithm for a framework; "" if none has."""
    names = libraries_with(algorithm, (framework,))
    return f"--rl_library {' or '.join(names)}" if names else ""
