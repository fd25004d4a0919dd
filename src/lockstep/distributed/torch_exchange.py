"""What every rank says, on every rank. One process alone may call all of it; of several, all do, in the same order."""

import json
from typing import Any

import torch

from lockstep.core.types import Comm
from lockstep.distributed.torch_group import current


def gather_json(value: Any, comm: Comm, tag: str) -> list[Any]:
    """Return every rank's value, in the order of ranks, on every rank; each as JSON gives it back.

    Args:
        value: this rank's: numbers, texts and None in any nest of dicts and lists.
        comm: the ranks.
        tag: what the exchange is for, in messages.
    """
    return [json.loads(text) for text in comm.gather_text(json.dumps(value), tag)]


def gather_text(text: str, *, comm: Comm | None = None) -> list[str]:
    """Return every rank's text, in the order of ranks, on every rank.

    Args:
        text: this rank's.
        comm: the ranks; None for the job's.
    """
    return (current() if comm is None else comm).gather_text(text, "text")


def any_rank(condition: bool, *, comm: Comm | None = None) -> bool:
    """Return on every rank whether the condition holds on any: for leaving a loop together, or skipping a step.

    Args:
        condition: as it is on this rank.
        comm: the ranks; None for the job's.
    """
    comm = current() if comm is None else comm
    return bool(comm.gather(torch.tensor([int(condition)]), "any rank").any())
