"""JSON lines between the driver and its worker processes, without pickle.

JSON has no tuples and only string keys, and some verifiers compare exactly these, so both are written with a
tag. Everything else must be plain JSON data.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO

_TUPLE = "__tuple__"
_PAIRS = "__pairs__"


class WireError(Exception):
    """A value that the protocol cannot carry; the message names its type and where it sits."""


def encode(value: Any, where: str = "value") -> Any:
    """Plain JSON data that `decode` turns back into `value` (tuples and non-string keys included)."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not {_TUPLE, _PAIRS} & value.keys():
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {_PAIRS: [[encode(k, f"key of {where}"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    raise WireError(f"{where} is a {type(value).__name__}; allowed: None, bool, int, float, str, list, tuple, dict")


def decode(value: Any) -> Any:
    """Inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(decode(item) for item in value[_TUPLE])
        if value.keys() == {_PAIRS}:
            return {decode(key): decode(item) for key, item in value[_PAIRS]}
        return {key: decode(item) for key, item in value.items()}
    return value


def dumps(message: dict[str, Any]) -> bytes:
    """One line of the protocol. ASCII, so that lone surrogates of a decoded completion survive."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def loads(line: bytes) -> dict[str, Any]:
    """The message of one line. Raises WireError when the line is no JSON object."""
    try:
        message = json.loads(line)
    except ValueError as error:
        raise WireError(f"not a JSON line: {line[:80]!r}") from error
    if not isinstance(message, dict):
        raise WireError(f"not a JSON object: {line[:80]!r}")
    return message


@dataclass(frozen=True)
class Wire:
    """The worker's end of the pipes."""

    incoming: TextIO
    outgoing: TextIO

    def receive(self) -> dict[str, Any] | None:
        """The next message, or None when the driver has closed the pipe or is gone."""
        line = self.incoming.readline()
        return loads(line.encode()) if line else None

    def send(self, message: dict[str, Any]) -> None:
        self.outgoing.write(dumps(message).decode("ascii"))
        self.outgoing.flush()


def claim_pipes() -> Wire:
    """Take stdin and stdout for the protocol alone.

    A verifier that prints writes to stderr from here on, one that reads gets end of file, and neither its
    output nor a process that it starts can touch the protocol.
    """
    incoming = os.fdopen(os.dup(0), "r", encoding="utf-8")
    outgoing = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    return Wire(incoming, outgoing)
