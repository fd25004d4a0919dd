"""How a rank that connects to another proves that it is of the same job, and says which it is.

The token comes from the one that listens, by way of the job's store: whoever has it has been there.
"""

import contextlib
import secrets
import socket
import struct

GREETING_S = 2.0
"""How long who has connected may take to greet."""

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<I{_TOKEN_BYTES}s")


def new_token() -> str:
    """Return a token, as hexadecimal digits, that nobody can guess."""
    return secrets.token_hex(_TOKEN_BYTES)


def hello(rank: int, token: str) -> bytes:
    """Return what ``rank`` sends first to the one that the token is from."""
    return _HELLO.pack(rank, bytes.fromhex(token))


def greeted_by(connection: socket.socket, token: str) -> int | None:
    """Return the rank at the other end of a connection that was accepted, None if it is a stranger without the token.

    Sets the connection's time-out.
    """
    connection.settimeout(GREETING_S)
    with contextlib.suppress(OSError, struct.error):
        rank, shown = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
        return int(rank) if secrets.compare_digest(shown, bytes.fromhex(token)) else None
    return None
