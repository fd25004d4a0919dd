"""Errors in one line."""

import pytest

from lockstep.core.errors import RunError, in_one_line

CALLBACK = """INTERNAL: callback failed: Traceback (most recent call last):
  File "own.py", line 3, in reward
KeyError: 'left'
"""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RunError("rank 1 has ended"), "rank 1 has ended"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError: "),
        (RuntimeError(CALLBACK), "RuntimeError: INTERNAL: callback failed: KeyError: 'left'"),
        (RuntimeError("Traceback (most recent call last):\n  x\nOSError: full"), "RuntimeError: OSError: full"),
    ],
)
def test_an_error_is_one_line(error: Exception, words: str) -> None:
    assert in_one_line(error) == words
