"""The command line in processes that are forked from one which has imported it: a command begins in 0.1 s, not in 7 s.

Each command is a process of its own all the same, with its own environment, output and signals, and ends as any other.
`python -m tests.flows.forkserver SOCKET` is the process that is forked from.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

_ROOT = Path(__file__).parents[2]
_POLL_S = 0.01
_START_S = 120.0


class Command:
    """A command that was started, with the part of `subprocess.Popen` that the tests use. Output goes to `out`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], out: int, new_session: bool) -> None:
        request = {"arguments": list(arguments), "environment": dict(environment), "new_session": new_session}
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server())
        self._answers = self._connection.makefile("r")
        content = json.dumps(request).encode() + b"\n"
        socket.send_fds(self._connection, [content[:1]], [out])
        self._connection.sendall(content[1:])
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal; `subprocess.TimeoutExpired` when it has not ended by then."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("fp8-grpo", timeout or 0.0)
            self.returncode = int(self._answers.readline())
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """To this process alone."""
        if self.poll() is None:
            os.kill(self.pid, number)


def run(arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output (both streams) of a command, which does not outlive this call; `TimeoutExpired` after
    `timeout_s`."""
    with tempfile.TemporaryFile() as out:
        command = Command(arguments, environment, out.fileno(), new_session=False)
        try:
            code = command.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            out.seek(0)
            raise subprocess.TimeoutExpired("fp8-grpo", timeout_s, out.read()) from error
        finally:
            command.send_signal(signal.SIGKILL)
        out.seek(0)
        return code, out.read().decode()


@cache
def _server() -> str:
    """The socket of this process's server, which ends with it."""
    folder = tempfile.TemporaryDirectory(prefix="forkserver-")
    place = f"{folder.name}/socket"
    server = subprocess.Popen([sys.executable, "-m", "tests.flows.forkserver", place], cwd=_ROOT, stdin=subprocess.PIPE)

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    deadline = time.monotonic() + _START_S
    while not Path(place).exists():
        assert server.poll() is None and time.monotonic() < deadline, "no process to fork from"
        time.sleep(_POLL_S)
    return place


def _serve(place: str) -> int:
    """Fork for each request until standard input ends; in a child the exit code of its command."""
    from flows.cli import main

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{place}.new")
    listener.listen()
    os.rename(f"{place}.new", place)
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, sys.stdin], [], [], _POLL_S)[0]
        if sys.stdin in ready:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return 0
        if listener in ready:
            connection, _ = listener.accept()
            request, out = _request(connection)
            pid = os.fork()
            if pid == 0:
                for each in (listener, connection, *running.values()):
                    each.close()
                return main(_become(request, out))
            os.close(out)
            connection.sendall(f"{pid}\n".encode())
            running[pid] = connection
        _report(running)


def _request(connection: socket.socket) -> tuple[dict[str, object], int]:
    first, (out,), _, _ = socket.recv_fds(connection, 1, 1)
    return json.loads(first + connection.makefile("rb").readline()), out


def _become(request: dict[str, object], out: int) -> list[str]:
    """Make this process what the request asks for; returns the arguments."""
    arguments, environment = request["arguments"], request["environment"]
    assert isinstance(arguments, list) and isinstance(environment, dict)
    if request["new_session"]:
        os.setsid()
    # A runner in the background may have SIGINT ignored, and children inherit that; a terminal has not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(out)
    np.random.seed()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["fp8-grpo", *arguments]
    return arguments


def _report(running: dict[int, socket.socket]) -> None:
    """The exit codes of those that have ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1]))
