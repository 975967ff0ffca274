"""Does anybody listen at the address of a Ray cluster? Ray itself waits without end where nobody does."""

from __future__ import annotations

import socket

_CONNECT_S = 5.0


def check_reachable(address: str) -> None:
    """`OSError` unless a plain connection to HOST:PORT comes about; `auto` names no place."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
