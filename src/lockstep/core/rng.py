"""Counter-based random streams, keyed by (seed, purpose, global env id, counter).

Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
in wrapping int32 arithmetic of the Python array API: numpy, torch and JAX give the same bits on any device. A stream
has no state: what env 37 sees at step 1000 is a function of the seed and those two numbers, so it depends neither on
how many ranks share the envs nor on where a run was interrupted.
"""

import hashlib
import math
from typing import NamedTuple

import numpy
from array_api_compat import is_jax_namespace

from lockstep.core.types import Array, Namespace

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
NUM_ROUNDS = 20
UNIFORM_BITS = 24  # a float32 holds every multiple of 2**-24 in [0, 1) exactly


class Words(NamedTuple):
    """A 64-bit quantity as two int32 arrays of the same or broadcastable shape."""

    low: Array
    high: Array


def threefry_2x32(xp: Namespace, key: Words, counter: Words) -> Words:
    """Return the 64 random bits that belong to ``counter`` under ``key``: int32 words of the broadcast shape.

    All four arrays are int32 with at least one axis (numpy warns of wrapping scalars, not of wrapping arrays).
    """
    schedule = (key.low, key.high, key.low ^ key.high ^ PARITY)
    x0, x1 = counter.low + schedule[0], counter.high + schedule[1]
    for round_index in range(NUM_ROUNDS):
        x0 = x0 + x1
        x1 = _rotate_left(xp, x1, ROTATIONS[round_index % 8]) ^ x0
        if round_index % 4 == 3:
            injection = round_index // 4 + 1
            x0 = x0 + schedule[injection % 3]
            x1 = x1 + schedule[(injection + 1) % 3] + injection
    return Words(x0, x1)


def _rotate_left(xp: Namespace, x: Array, distance: int) -> Array:
    # The right shift of an int32 copies the sign bit, so the mask keeps only the bits that were rotated in.
    return (x << distance) | ((x >> (32 - distance)) & ((1 << distance) - 1))


def as_int32(value: int) -> int:
    """Return the int32 whose bits are the lowest 32 of ``value``."""
    return (value + 2**31) % 2**32 - 2**31


class Stream:
    """The random numbers of one purpose: an endless table with a row per (counter, env id).

    Args:
        seed: the run's seed, 0 <= seed < 2**64.
        purpose: what the numbers are for; different purposes are independent.
        xp: array namespace of the results.
        device: where results live; None for the namespace's default.
    """

    def __init__(self, seed: int, purpose: str, xp: Namespace, device: object = None) -> None:
        self._xp, self._device = xp, device
        # Under jax.jit an array made of a constant is a tracer, which must not outlive its trace.
        self._keys_stay_on_host = is_jax_namespace(xp)
        digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
        purpose_words = _host_words(int.from_bytes(digest, "little"))
        self._key = threefry_2x32(numpy, _host_words(seed), purpose_words)
        self._pair_keys: dict[int, Words] = {}  # on the device: a copy from the host would wait for its work

    def bits(self, counters: Array, ids: Array, num_columns: int) -> Array:
        """Return int32 bits ``(num_columns, num_counters, num_ids)`` for int32 ``counters`` and ``ids`` (1-d)."""
        xp = self._xp
        num_pairs = (num_columns + 1) // 2
        key = self._keys_of_pairs(num_pairs)
        words = threefry_2x32(xp, key, Words(xp.reshape(ids, (1, 1, -1)), xp.reshape(counters, (1, -1, 1))))
        pairs = xp.stack(tuple(words), axis=1)  # (num_pairs, 2, num_counters, num_ids)
        return xp.reshape(pairs, (2 * num_pairs, *pairs.shape[2:]))[:num_columns]

    def counters(self, first: int | Array, count: int) -> Array:
        """Return the int32 counters ``(count,)`` that begin with ``first``, which wraps.

        ``first`` is a number, or an int32 array ``()`` of the stream's framework that JAX may be tracing.
        """
        start = as_int32(int(first)) if isinstance(first, int | numpy.integer) else first
        return self._xp.arange(count, dtype=self._xp.int32, device=self._device) + start

    def _keys_of_pairs(self, num_pairs: int) -> Words:
        """Return a key for every pair of columns, ``(num_pairs, 1, 1)``."""
        if num_pairs not in self._pair_keys:
            index = numpy.arange(num_pairs, dtype=numpy.int32)
            words = threefry_2x32(numpy, self._key, Words(index, numpy.zeros_like(index)))
            keys = (numpy.reshape(word, (num_pairs, 1, 1)) for word in words)
            if not self._keys_stay_on_host:
                keys = (self._xp.asarray(key, device=self._device) for key in keys)
            self._pair_keys[num_pairs] = Words(*keys)
        return self._pair_keys[num_pairs]

    def uniform(self, counters: Array, ids: Array, num_columns: int, dtype: object) -> Array:
        """Return ``(num_counters, num_ids, num_columns)`` floats in [0, 1), bitwise the same on any device."""
        return self._xp.moveaxis(self._uniform(counters, ids, num_columns, dtype), 0, -1)

    def normal(self, counters: Array, ids: Array, num_columns: int, dtype: object) -> Array:
        """Return ``(num_counters, num_ids, num_columns)`` standard normals (Box and Muller 1958), same to rounding."""
        xp = self._xp
        num_pairs = (num_columns + 1) // 2
        uniform = self._uniform(counters, ids, 2 * num_pairs, dtype)
        radius = xp.sqrt(-2.0 * xp.log(1.0 - uniform[0::2]))
        angle = 2.0 * math.pi * uniform[1::2]
        pairs = xp.stack((radius * xp.cos(angle), radius * xp.sin(angle)), axis=1)
        return xp.moveaxis(xp.reshape(pairs, (2 * num_pairs, *pairs.shape[2:]))[:num_columns], 0, -1)

    def _uniform(self, counters: Array, ids: Array, num_columns: int, dtype: object) -> Array:
        bits = self.bits(counters, ids, num_columns)
        fraction = (bits >> (32 - UNIFORM_BITS)) & (2**UNIFORM_BITS - 1)
        return self._xp.astype(fraction, dtype) * 2.0**-UNIFORM_BITS


def _host_words(value: int) -> Words:
    words = (value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF)
    return Words(*(numpy.asarray([as_int32(word)], dtype=numpy.int32) for word in words))


def stream_seed(seed: int, purpose: str) -> int:
    """Return a 63-bit seed for a generator that is not ours, a hash of the run's seed and what the numbers are for."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
