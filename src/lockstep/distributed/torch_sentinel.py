"""The sentinel: is everything that ranks hold in common still the same on all of them, bit for bit?"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from lockstep.core.errors import RunError
from lockstep.core.types import Comm
from lockstep.distributed.differences import first_difference, odd, others_in_words, usual
from lockstep.distributed.torch_listing import digest_of, gather_listings, listing_of
from lockstep.distributed.wording import name_ranks

# Integers of the same width, to see a tensor's bits; 16 bytes (complex128) are seen as two words.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_CHUNK = 1 << 22  # words mixed at once, so that a large tensor needs no large copies

# SplitMix64 (Steele, Lea and Flood 2014): increment, then (shift, multiplier) twice and a last shift. int64 wraps.
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_LAST_SHIFT = 31


@torch.no_grad()
def checksums(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return ``(num_tensors,)`` int64: one sum over the raw bits of each tensor, in the order of the mapping.

    Any dtype, strides and size. Equal only if every entry has the same bits at the same place, but for a chance of one
    in 2^64. Computed where the tensors are, without waiting for a device; the result is on the first device that is
    not the CPU, if there is one.
    """
    others = [tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"]
    device = others[0] if others else torch.device("cpu")
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack([_checksum(tensor).to(device, non_blocking=True) for tensor in tensors.values()])


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    words = plain.view(_WORDS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.shape[0], _CHUNK):
        part = words[start : start + _CHUNK]
        place = torch.arange(start + 1, start + 1 + part.shape[0], dtype=torch.int64, device=words.device)
        # A weighted sum of the bits alone would not do: two flipped signs of float64 are 2^63 apart each, whatever
        # their (odd) weights are, and cancel. So each word is scrambled with its place before the sum.
        total += _scramble_(place.mul_(_INCREMENT).add_(part)).sum()
    return total


def _scramble_(words: torch.Tensor) -> torch.Tensor:
    """Scramble int64 words one by one, in place: a bijection, so one changed word always changes the sum."""
    for shift, multiplier in _ROUNDS:
        _fold_(words, shift).mul_(multiplier)
    return _fold_(words, _LAST_SHIFT)


def _fold_(words: torch.Tensor, shift: int) -> torch.Tensor:
    # The mask makes the shift a logical one; int64's own drags the sign along.
    return words.bitwise_xor_((words >> shift) & ((1 << (64 - shift)) - 1))


class Sentinel:
    """Compares replicated tensors over the ranks every ``interval`` iterations, and whenever something is to be kept.

    Args:
        comm: the ranks.
        interval: in iterations; 0 turns the sentinel off.
    """

    def __init__(self, comm: Comm, interval: int) -> None:
        self._comm, self._interval = comm, interval
        self._last_equal: int | None = None

    def is_due(self, iteration: int, is_kept: bool = False) -> bool:
        """Tell whether ``check`` compares in this iteration."""
        is_on = self._interval > 0 and self._comm.world_size > 1
        return is_on and (is_kept or iteration % self._interval == 0)

    def check(self, iteration: int, tensors: Mapping[str, torch.Tensor], is_kept: bool = False) -> None:
        """Compare, if it is due: one exchange of three numbers, and one look at them by the host.

        Args:
            iteration: the same on every rank.
            tensors: by name, in the same order on every rank; the first that differs is named.
            is_kept: a checkpoint of this iteration comes next, so it is compared whatever the interval.

        Raises:
            RunError: something differs; every rank raises the same line.
        """
        if not self.is_due(iteration, is_kept):
            return
        listing = listing_of(tensors)
        sums = checksums(tensors)
        # The exchange has one size on all ranks, even if they hold different tensors: who holds what comes later.
        head = torch.tensor([iteration, digest_of(listing)], dtype=torch.int64)
        own = torch.cat((head.to(sums.device), _checksum(sums).unsqueeze(0)))
        rows = self._comm.gather(own, "sentinel").tolist()
        if all(row == rows[0] for row in rows):
            self._last_equal = iteration
            return
        iterations, listings = [row[0] for row in rows], [row[1] for row in rows]
        if odd(iterations):
            self._stop_for_iterations(iterations)
        if odd(listings):
            self._stop_for_listings(iteration, listings, listing)
        self._stop_for_tensors(iteration, list(tensors), sums)

    def _stop_for_iterations(self, iterations: Sequence[int]) -> NoReturn:
        one, other = odd(iterations)[0], usual(iterations)
        self._stop(
            f"ranks are out of step: rank {one} is in iteration {iterations[one]}, rank {other} in iteration "
            f"{iterations[other]}; look for a loop that one rank left early"
        )

    def _stop_for_listings(self, iteration: int, digests: Sequence[int], listing: Sequence[str]) -> NoReturn:
        every = gather_listings(listing, self._comm, "sentinel names")
        difference = first_difference(every, odd(digests)[0], usual(digests))
        self._stop(
            f"ranks are out of step in iteration {iteration}: {difference}; build the same networks and "
            "normalisers from the same config on every rank"
        )

    def _stop_for_tensors(self, iteration: int, names: Sequence[str], sums: torch.Tensor) -> NoReturn:
        by_tensor = self._comm.gather(sums, "sentinel sums").T.tolist()
        first, *others = [index for index, own in enumerate(by_tensor) if odd(own)]
        more = others_in_words(len(others), "tensor")
        before = "" if self._last_equal is None else f" (all were equal in iteration {self._last_equal})"
        self._stop(
            f"ranks are out of step in iteration {iteration}: {names[first]} differs on "
            f"{name_ranks(odd(by_tensor[first]))} (of {self._comm.world_size}), {more}{before}; look for what changes "
            "it from one rank's own data, or run with LOCKSTEP_DEBUG_COLLECTIVES=1, which stops where ranks part"
        )

    def _stop(self, line: str) -> NoReturn:
        raise RunError(line, shared=True)
