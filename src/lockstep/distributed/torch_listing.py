"""Lists of what ranks should have alike: as lines of text, as one number to compare, and in what two differ first.

A listing has a line ``name, tab, kind`` for each entry, in an order that counts.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch

from lockstep.core.errors import UsageError
from lockstep.core.types import Comm
from lockstep.distributed.differences import first_difference


def listing_of(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return a line ``name, tab, type and shape`` for each tensor."""
    return [f"{name}\t{dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for name, tensor in tensors.items()]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name as ``getattr(torch, name)`` takes it."""
    return str(dtype).removeprefix("torch.")


def digest_of(listing: Sequence[str]) -> int:
    """Return 64 bits (signed) that are equal for equal listings, and else only by a chance of one in 2^64."""
    digest = hashlib.blake2b("\n".join(listing).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def gather_listings(listing: Sequence[str], comm: Comm, tag: str) -> list[list[str]]:
    """Return every rank's listing, in the order of ranks, on every rank."""
    return [text.split("\n") if text else [] for text in comm.gather_text("\n".join(listing), tag)]


def require_same(listing: Sequence[str], comm: Comm, what: str) -> None:
    """Check that all ranks have the same listing: one exchange, unless they differ.

    Raises:
        UsageError: naming the first difference; every rank raises the same line.
    """
    digests = comm.gather(torch.tensor([digest_of(listing)]), f"{what} listing").flatten().tolist()
    if len(set(digests)) == 1:
        return
    listings = gather_listings(listing, comm, f"{what} names")
    rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
    difference = first_difference(listings, rank, 0)
    raise UsageError(f"{what}: {difference}; build the same on every rank", shared=True)
