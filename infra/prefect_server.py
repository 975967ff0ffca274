"""The embedded Prefect server: one for the process, gone with it.

Prefect starts one by itself when no API is configured, but inside the terminal's process group, where Ctrl-C
ends it before the flow can report how it ended, and without a tie to its parent, so that it outlives a
killed driver. The server here has a session of its own and dies with its parent (Linux).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1


class PrefectServerError(RuntimeError):
    """The embedded server did not start."""


class EmbeddedPrefectServer:
    """Starts at once in the background; `wait` returns when it answers. Ends when the interpreter exits."""

    def __init__(self, log: Path) -> None:
        self._port = _free_port()
        self._log = log
        self.url = f"http://127.0.0.1:{self._port}/api"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                _command(self._port),
                env=os.environ | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"},
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        # Registered before prefect is imported, so that it runs after prefect's own exit handlers.
        atexit.register(self.stop)

    def wait(self, timeout_s: float) -> None:
        """Block until the server is healthy; `PrefectServerError` when it ended or `timeout_s` passed."""
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            if self._process.poll() is not None:
                raise PrefectServerError(
                    f"the embedded Prefect server ended with {self._process.poll()}; see {self._log}"
                )
            if time.monotonic() > deadline:
                raise PrefectServerError(
                    f"the embedded Prefect server did not answer in {timeout_s:g} s; see {self._log}"
                )
            time.sleep(_POLL_S)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """End the server; a second call does nothing."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _command(port: int) -> list[str]:
    spec = find_spec("prefect")
    assert spec is not None and spec.origin is not None
    application = ["--app-dir", str(Path(spec.origin).parents[1]), "--factory", "prefect.server.api.server:create_app"]
    place = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    return [sys.executable, "-m", "uvicorn", *application, *place]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
