"""How messages name ranks, and say in one line what torch says in many."""

import contextlib
from collections.abc import Iterable, Iterator

from lockstep.core.errors import RunError


@contextlib.contextmanager
def torch_errors_in_words(what: str, mend: str) -> Iterator[None]:
    """Turn an error of torch's backends into ``what (its first line); mend``.

    Raises:
        RunError: instead of ``RuntimeError``.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"{what} ({reason}); {mend}") from error


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ``"rank 1"``, ``"ranks 1 and 3"``, ``"ranks 0 to 5, 8 and 9"``; at least one rank is needed."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    # "1 to 2" reads worse than "1 and 2".
    words = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    *front, last = words
    listed = f"{', '.join(front)} and {last}" if front else last
    return f"ranks {listed}" if len(ordered) > 1 else f"rank {listed}"
