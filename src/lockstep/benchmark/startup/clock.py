"""How long each phase of a start takes, and which functions take it.

What is measured loads this module first of all, so it imports nothing that a start would not have loaded anyway.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import cProfile

    from lockstep.session.runner import SessionRunner

PHASES = {
    "interpreter": "Python itself, from the creation of the process on, and the package lockstep without its parts",
    "imports": "lockstep, the framework, the engine and the learner, wherever in the start they are loaded",
    "config": "the task's recipe, the settings over it, and all that is checked before the ranks meet",
    "join": "meeting the other ranks, the wait for the last one included; here the framework finds its devices",
    "engine_start": "the physics engine",
    "env_creation": "the task and its envs, at the start of their first episodes",
    "learner": "networks and optimizer; with JAX also tracing the iteration, and the state that it begins with",
    "first_step": "one env step, done; with JAX, where a step is part of a program, one made for it alone, which is "
    "compiled after all else and not in total",
    "compile": "with JAX: compiling the iteration, or finding it among what was kept",
    "first_iteration": "the first iteration, done, without compile",
    "total": "from the creation of the process until the first iteration was done",
}
"""What a start goes through, in order, in words for people."""

NUM_FUNCTIONS = 8
"""Of each phase: half of them took longest with what they called, the others by themselves."""
_PASSED_ON = 0.9
_WORTH_NAMING, _LEAST_S = 0.01, 1e-4
_MACHINERY = ("<frozen importlib", "importlib/__init__.py", "<frozen runpy>", "benchmark/startup/")
_PLUMBING = ("builtins.exec>", "builtins.__import__>", "_lsprof.Profiler")

Function = tuple[str, int, str]
Stats = dict[Function, tuple[int, int, float, float, dict[Function, tuple[int, int, float, float]]]]
"""As ``cProfile`` has them: primitive calls, calls, own and total seconds, and the same by caller."""


@dataclass(frozen=True)
class Built:
    """A training at the point where it starts."""

    runner: SessionRunner
    evaluation_env: Any
    ranks: tuple[int, ...]
    """Of this process."""
    step: Callable[[], None]
    """Makes one env step, and returns once it is done."""
    step_is_apart: bool
    """Whether that is a program of its own, which no training needs."""


class PhaseClock:
    """Counts the seconds of phases; one runs at a time.

    Args:
        phase: the first.
        began_s: when that one began, by ``time.monotonic``, which is one clock for all processes of a host.
        note: file that tells the phase, for whoever waits for this process; None: nobody does.
        profiles: whether to look at functions too, which makes everything slower.

    Attributes:
        seconds: of each phase so far, without the one that runs.
        total_s: of all of them.
    """

    def __init__(self, phase: str, began_s: float, note: Path | None = None, profiles: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._note = note
        self._profiles: dict[str, cProfile.Profile] | None = {} if profiles else None
        self._running: str | None = None
        self._since_s = began_s
        self._change(phase, began_s)

    @property
    def total_s(self) -> float:
        """Seconds of all phases so far, without the one that runs."""
        return sum(self.seconds.values())

    def enter(self, phase: str) -> None:
        """Let a phase begin, and the one that runs end."""
        self._change(phase, time.monotonic())

    def stop(self) -> None:
        """Let the phase that runs end."""
        self._change(None, time.monotonic())

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count this context to a phase, and what follows to the one that runs now."""
        before = self._running
        self.enter(phase)
        try:
            yield
        finally:
            self._change(before, time.monotonic())

    def functions(self) -> list[dict[str, Any]]:
        """Return the most expensive functions of each phase, as ``schema.FunctionTime`` has them."""
        found: list[dict[str, Any]] = []
        profiles = self._profiles or {}
        for phase in sorted(profiles, key=list(PHASES).index):
            profiles[phase].create_stats()
            stats: Any = profiles[phase].stats  # of which typeshed says that its seconds are whole numbers
            found += [{"phase": phase} | function for function in most_expensive(stats)]
        return found

    def _change(self, phase: str | None, now_s: float) -> None:
        if self._running is not None:
            self._profile(self._running, on=False)
            self.seconds[self._running] = self.seconds.get(self._running, 0.0) + now_s - self._since_s
        self._running, self._since_s = phase, now_s
        if phase is not None:
            if self._note is not None:
                self._note.write_text(phase)
            self._profile(phase, on=True)

    def _profile(self, phase: str, on: bool) -> None:
        if self._profiles is None:
            return
        if phase not in self._profiles:
            import cProfile

            self._profiles[phase] = cProfile.Profile()
        profile = self._profiles[phase]
        if on:
            profile.enable()
        else:
            profile.disable()


def time_engine(clock: PhaseClock, import_string: str) -> None:
    """Have the clock count what a function that makes engines takes, wherever in the creation of envs it is called.

    Args:
        clock: of this process.
        import_string: of that function, as it is registered; importing it counts as that.
    """
    module_name, _, name = import_string.partition(":")
    with clock.within("imports"):
        module = importlib.import_module(module_name)
    make = getattr(module, name)

    @functools.wraps(make)
    def timed(*arguments: Any, **named: Any) -> Any:
        with clock.within("engine_start"):
            return make(*arguments, **named)

    # Nothing between the session and the engine tells when it is made; the name is looked up just before.
    setattr(module, name, timed)


def most_expensive(stats: Stats, num_functions: int = NUM_FUNCTIONS) -> list[dict[str, Any]]:
    """Return the functions that explain best where time went, those with the largest total first.

    Half of them are those with the largest total time, but for those that only pass it on to one other function, and
    for what Python itself does to import; the others took longest by themselves. What took less than a hundredth of
    the longest, or than 0.1 ms, is not worth naming.

    Args:
        stats: of a profiler.
        num_functions: how many at most.
    """
    known = {function: each for function, each in stats.items() if not _is_machinery(function)}
    total_s = {function: each[3] for function, each in known.items()}
    least_s = max(_LEAST_S, max(total_s.values(), default=0.0) * _WORTH_NAMING)
    worth = sorted((each for each in known if total_s[each] > least_s), key=lambda each: -total_s[each])
    passed_s = _passed_on(known, worth)
    chosen = [each for each in worth if passed_s.get(each, 0.0) < _PASSED_ON * total_s[each]][: num_functions // 2]
    by_own = sorted((each for each in worth if each not in chosen), key=lambda each: -known[each][2])
    chosen += by_own[: num_functions - len(chosen)]
    return [
        {
            "function": name_of(function),
            "calls": known[function][1],
            "own_s": max(0.0, known[function][2]),
            "total_s": max(0.0, total_s[function]),
        }
        for function in sorted(chosen, key=lambda each: -total_s[each])
    ]


def _passed_on(known: Stats, by_total: list[Function]) -> dict[Function, float]:
    """Return the seconds that each function spent in the one that it spent most in.

    Args:
        known: functions.
        by_total: the same, those with the largest total first.
    """
    longest_s: dict[Function, float] = {}
    for function, (*_, callers) in known.items():
        for caller, call in callers.items():
            if caller != function:
                longest_s[caller] = max(longest_s.get(caller, 0.0), call[3])
    # Who imports whom is lost in Python's machinery. Of modules that took about as long, one has loaded the next.
    modules = [each for each in by_total if each[2] == "<module>"]
    for loader, loaded in itertools.pairwise(modules):
        longest_s[loader] = max(longest_s.get(loader, 0.0), known[loaded][3])
    return longest_s


def name_of(function: Function) -> str:
    """Return where a function is and its name: ``torch/nn/modules/linear.py:120 forward``."""
    path, line, name = function
    if path == "~":  # made in C
        return name
    folders = sorted((folder for folder in sys.path if folder and path.startswith(f"{folder}/")), key=len)
    short = path[len(folders[-1]) + 1 :] if folders else path
    return f"{short}:{line} {name}"


def _is_machinery(function: Function) -> bool:
    path, _, name = function
    return any(part in path for part in _MACHINERY) or any(part in name for part in _PLUMBING)
