"""Work on a file system that may have gone, as with the network to it: no signal ends a call that hangs there."""

import threading
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

LOOK_S = 2.0
"""How long a file system may take to let us look at something."""
WRITE_S = 10.0
"""... and to take a few lines, and perhaps to let us import what writes them."""


def answer_within(seconds: float, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Return what a function returns, ``otherwise`` if it takes longer.

    It then goes on in a thread that this process does not wait for at its end, so it must do no harm if it is late.

    Args:
        seconds: to wait.
        ask: what may hang; what it raises is raised here.
        otherwise: what is taken for an answer if none comes.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="lockstep-patience", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return answers[0] if answers else otherwise
