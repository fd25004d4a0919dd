"""What one process does for all: its outcome, an error included, is the same on every one of them."""

import json
from collections.abc import Callable

from lockstep.core.errors import LockstepError, RunError, UsageError


def run_on_main(work: Callable[[], str], rank: int, gather_text: Callable[[str], list[str]]) -> str:
    """Run ``work`` on rank 0 alone and return its text on every rank; all of them call this together.

    Args:
        work: what is to be done once.
        rank: of this process.
        gather_text: returns every rank's text, in the order of ranks, on every rank.

    Raises:
        LockstepError: what ``work`` raised, on every rank, marked as ``shared``: rank 0 says it for all.
    """
    outcome = {"text": ""}
    unexpected: BaseException | None = None
    if rank == 0:
        try:
            outcome["text"] = work()
        except LockstepError as error:
            outcome = {"error": str(error), "kind": "usage" if isinstance(error, UsageError) else "run"}
        except BaseException as error:  # the others must not wait for ever, whatever happened here
            unexpected = error
            outcome = {"error": f"rank 0 failed: {type(error).__name__}: {error}".partition("\n")[0], "kind": "run"}
    told = json.loads(gather_text(json.dumps(outcome) if rank == 0 else "")[0])
    if unexpected is not None:
        raise unexpected
    if "error" in told:
        kind = UsageError if told["kind"] == "usage" else RunError
        raise kind(told["error"], shared=True)
    return str(told["text"])
