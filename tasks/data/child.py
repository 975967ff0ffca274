"""A Python child process that speaks JSON lines, with a deadline for every exchange.

Signal-based limits work in the main thread only, and verifiers run wherever the flow calls them. A process
can be ended from any thread, so each limit here is the life of a child.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from tasks.data.wire import WireError, dumps, loads

_TAIL_BYTES = 4000
_CLOSE_GRACE_S = 2.0


class ChildTimeout(Exception):
    """The deadline passed before the exchange was complete."""


class ChildDied(Exception):
    """The child ended or broke the protocol; the message gives its exit status and the end of its stderr."""


class Child:
    """`python -m module` in a session of its own, with pipes. Not thread-safe; the owner holds the lock.

    The hash seed is fixed, so that code which walks over sets gives the same result in every run. Import
    paths are those of this process; the working directory is not one of them unless it is one here.
    Deadlines are on the clock of time.monotonic().
    """

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=_environment(),
            start_new_session=True,
        )
        self._stdin, self._stdout, self._stderr = _pipes(self._process)
        os.set_blocking(self._stdin.fileno(), False)
        self._buffer = bytearray()
        self._tail = b""
        self._drain = threading.Thread(target=self._keep_tail, name=f"stderr of {module}", daemon=True)
        self._drain.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any], deadline: float = float("inf")) -> None:
        """Write one message. Raises ChildTimeout, ChildDied."""
        data = memoryview(dumps(message))
        while data:
            self._wait(self._stdin.fileno(), select.POLLOUT, deadline)
            try:
                data = data[os.write(self._stdin.fileno(), data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ChildDied(self._obituary()) from None

    def receive(self, deadline: float = float("inf")) -> dict[str, Any]:
        """Read one message. Raises ChildTimeout, ChildDied."""
        while (end := self._buffer.find(b"\n")) < 0:
            self._wait(self._stdout.fileno(), select.POLLIN, deadline)
            chunk = os.read(self._stdout.fileno(), 1 << 16)
            if not chunk:
                raise ChildDied(self._obituary())
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return loads(line)
        except WireError as error:
            raise ChildDied(f"broke the protocol: {error}") from error

    def kill(self) -> None:
        """End the child and whatever it started, now."""
        # Once reaped, the id may belong to somebody else.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._release()

    def close(self) -> None:
        """Close the child's stdin, which ends it; kill it when it is still there after two seconds."""
        self._stdin.close()
        deadline = time.monotonic() + _CLOSE_GRACE_S
        with contextlib.suppress(ChildTimeout, ChildDied, ValueError):
            while True:
                self.receive(deadline)
        self.kill()

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        # poll, not select: a driver with many connections has descriptors above 1024.
        poll = select.poll()
        poll.register(descriptor, event)
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ChildTimeout
            if poll.poll(min(remaining, 3600.0) * 1000):
                return

    def _keep_tail(self) -> None:
        # Reads raw chunks: a verifier that prints without end must neither block nor fill memory.
        while chunk := self._stderr.read(1 << 14):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def _obituary(self) -> str:
        self._drain.join(timeout=1.0)
        try:
            status = f"ended with exit status {self._process.wait(timeout=1.0)}"
        except subprocess.TimeoutExpired:
            status = "closed its pipe"
        tail = self._tail.decode("utf-8", "replace").strip()
        return f"{status}; end of its stderr: {tail}" if tail else status

    def _release(self) -> None:
        self._stdin.close()
        self._stdout.close()
        self._drain.join(timeout=1.0)
        if not self._drain.is_alive():
            self._stderr.close()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise RuntimeError("the child process was started without pipes")
    return process.stdin, process.stdout, process.stderr


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
