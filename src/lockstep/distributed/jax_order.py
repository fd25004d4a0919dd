"""Collectives that XLA could mix up, found before they are compiled.

On a CPU all collectives of a program share one meeting place, and XLA may go on past a loop that is still running to
whatever doesn't depend on it. A collective that comes next, and neither follows from the loop nor the loop from it, is
then taken for one inside the loop: the process ends (``Check failed: id < num_threads``, a segmentation fault), or sums
are wrong. Processes that reach one another by gloo end too (``Received data size doesn't match expected size``).

XLA's executor sees to it that collectives, and loops with collectives in them, start in the same order everywhere, but
not that one ends before the next starts (``ExecutionGraph``: edges of kind ``kScheduling``). We know of no flag that
changes it; the executor that waits is an option of the build. It happens seldom: only if the compiler puts the loop
first, and a pool's thread finishes its body. With the check left out some 1,300 calls of such programs on 2 and 4
devices, 60 by gloo, and short trainings by PPO and SAC without ``after`` all ran right (JAX 0.10.2, two cores), so no
test shows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax._src import source_info_util
from jax.extend import core
from jax.sharding import Mesh

from lockstep.core.errors import UsageError

_COLLECTIVES = {
    *("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin", "ppermute", "pgather"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ragged_all_to_all"),
    *("reduce_scatter", "unreduced_reduce_scatter"),
}
_LOOPS = {"scan": "loop", "while": "loop", "cond": "branch"}  # run on their own; all else is inlined


@dataclass(frozen=True)
class _Event:
    """A collective, or a loop or branch with collectives in it."""

    words: str
    is_loop: bool
    follows: int  # a bit for each earlier event that its operands depend on


@dataclass
class _Level:
    """One sequence of operations as XLA runs it: the whole program, or the body of a loop."""

    events: list[_Event] = field(default_factory=list)

    def add(self, words: str, is_loop: bool, follows: int) -> int:
        """Return the bit of a new event, which must follow from each earlier one if either is a loop."""
        for number, earlier in enumerate(self.events):
            if (is_loop or earlier.is_loop) and not follows >> number & 1:
                raise UsageError(
                    f"{earlier.words} and {words} don't depend on one another, so that the CPU may take a message of "
                    "one for the other's; give one of them values that follow from the other's result, as by "
                    "after(values, result) of lockstep.distributed.jax"
                )
        self.events.append(_Event(words, is_loop, follows))
        return 1 << (len(self.events) - 1)


def mixes_up(mesh: Mesh) -> bool:
    """Return whether the devices of a mesh could mix collectives up: several CPU devices."""
    return mesh.size > 1 and all(device.platform == "cpu" for device in mesh.devices.flat)


def require_order(program: core.ClosedJaxpr) -> None:
    """Check that each loop or branch with collectives in it comes before or after all others, by its data.

    Collectives outside of loops may be as they like: they run one after another.

    Raises:
        UsageError: naming two that could be mixed up, and where they are.
    """
    _walk(program.jaxpr, [0] * len(program.jaxpr.invars), _Level())


def _walk(jaxpr: Any, given: list[int], level: _Level) -> list[int]:
    """Return, for each output, the events that it depends on; ``given`` has those of the inputs."""
    known: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else known.get(atom, 0)

    for equation in jaxpr.eqns:
        operands = [of(atom) for atom in equation.invars]
        everything = 0
        for each in operands:
            everything |= each
        name, inner = equation.primitive.name, list(_bodies(equation))
        if name in _COLLECTIVES:
            everything |= level.add(_words(name, equation), False, everything)
        elif name not in _LOOPS and len(inner) == 1 and _fits(inner[0], equation):
            known.update(zip(equation.outvars, _walk(inner[0], operands, level), strict=True))
            continue
        elif (first := next((found for body in inner for found in collectives_of(body)), None)) is not None:
            for body in inner:
                _walk(body, [0] * len(body.invars), _Level())
            place = f"the {_LOOPS.get(name, name)} at {_place(equation)} with its {first}"
            everything |= level.add(place, True, everything)
        known.update(dict.fromkeys(equation.outvars, everything))
    return [of(atom) for atom in jaxpr.outvars]


def _fits(body: Any, equation: Any) -> bool:
    return len(body.invars) == len(equation.invars) and len(body.outvars) == len(equation.outvars)


def _bodies(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def collectives_of(jaxpr: Any) -> Iterator[str]:
    """Yield what a program, or a part of one, exchanges between ranks: which collective, and where it is."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _COLLECTIVES:
            yield _words(equation.primitive.name, equation)
        for body in _bodies(equation):
            yield from collectives_of(body)


def _words(name: str, equation: Any) -> str:
    return f"{name.removesuffix('_invariant')} at {_place(equation)}"


def _place(equation: Any) -> str:
    frames = source_info_util.user_frames(equation.source_info.traceback)
    # Where the algorithm calls what is here, not here.
    frame = next((each for each in frames if not each.file_name.endswith(_OWN_FILES)), None)
    if frame is None:
        return "an unknown place"
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


_OWN_FILES = ("distributed/jax_collectives.py", "distributed/jax_moments.py", "distributed/jax_gradients.py")
