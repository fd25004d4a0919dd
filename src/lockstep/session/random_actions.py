"""Actions without a policy: uniform, keyed by global env id and env step, the same in any framework on any ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.rng import Stream

if TYPE_CHECKING:
    from lockstep.core.types import ActionSpace, Array, Namespace


class RandomActions:
    """Draws the actions of a benchmark.

    Args:
        space: continuous ones are in [-1, 1), discrete ones in [0, size).
        seed: of the run.
        xp: array namespace of the actions.
        dtype: of continuous actions.
        index_dtype: of discrete ones.
        device: where they live; None for the namespace's default.
    """

    def __init__(
        self, space: ActionSpace, seed: int, xp: Namespace, dtype: object, index_dtype: object, device: object = None
    ) -> None:
        self._space, self._xp, self._dtype, self._index_dtype = space, xp, dtype, index_dtype
        self._stream = Stream(seed, "benchmark/action", xp, device)

    def draw(self, num_steps_before: int | Array, num_steps: int, env_ids: Array) -> Array:
        """Return ``(num_steps, num_envs, size)`` floats, or ``(num_steps, num_envs)`` integers if discrete.

        Args:
            num_steps_before: env steps that each env has made so far; an int32 array ``()`` may be traced.
            num_steps: how many are to come.
            env_ids: ``(num_envs,)`` int32 global ids.
        """
        counters, size = self._stream.counters(num_steps_before, num_steps), self._space.size
        if self._space.kind == "continuous":
            return 2.0 * self._stream.uniform(counters, env_ids, size, self._dtype) - 1.0
        uniform = self._stream.uniform(counters, env_ids, 1, self._dtype)[..., 0]
        return self._xp.astype(self._xp.floor(uniform * size), self._index_dtype)
