"""The sweep's side of `sweep.children=shared`: the process in which its runs follow each other, and its successors."""

from __future__ import annotations

import time
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from conf.overrides import override_key
from flows.shared_runs import Request, Setup
from flows.sweep_children import ChildError, Process, end_process, finished, last_line, late, start_process
from flows.sweep_plan import Child
from infra.run_actors import actor_prefix

_PROGRAM: Final = "import sys; from flows.shared_runs import main; sys.exit(main(int(sys.argv[1])))"
_END_S: Final = 60.0
"""Longest wait for the end of a process that has nothing more to do."""
_LONGEST_POLL_S: Final = 1e6


class SharedRuns:
    """Runs children in one process with one Ray. After its end by a crash, an interrupt or lateness the next run gets
    a new one; with it end all engines that were kept.

    `owner`: id of the sweep's flow run, of which the kept actors are; `most` of them are kept; `log` takes what the
    process says outside of its runs.
    """

    def __init__(self, owner: str, most: int, log: Path, api_url: str | None) -> None:
        self._owner = owner
        self._most = most
        self._log = log
        self._api_url = api_url
        self._starts = 0
        self._held: tuple[Process, Connection] | None = None

    def run(self, child: Child, log: Path, timeout_s: float) -> bool:
        """As `flows.sweep_children.run_here`."""
        setup = None
        if self._held is not None and self._held[0].poll() is not None:
            # It died while it had nothing to do, which is no fault of the run that comes next.
            self.close(0.0)
        if self._held is None:
            self._starts += 1
            setup = Setup(cluster_overrides(child), actor_prefix(self._owner, self._starts), self._most)
            self._held = self._start()
        (process, connection), self._held = self._held, None
        with ExitStack() as stack:
            stack.callback(end_process, process)
            stack.callback(connection.close)
            try:
                if setup is not None:
                    connection.send(setup)
                connection.send(Request(child.name, child.overrides, str(log), time.time()))
                if not connection.poll(min(timeout_s, _LONGEST_POLL_S)):
                    raise late(child, timeout_s, log)
                code: int = connection.recv()
            except (EOFError, OSError) as error:
                end_process(process, _END_S)
                text = last_line(log if log.is_file() else self._log)
                raise ChildError(
                    f"{child.name}: the process of the sweep's runs ended with exit code {process.returncode}: {text}; "
                    f"see {log} and {self._log}"
                ) from error
            # It goes on living.
            stack.pop_all()
        self._held = process, connection
        return finished(child, code, log)

    def close(self, wait_s: float = _END_S) -> None:
        """End the process, if there is one, and all that it keeps."""
        if self._held is not None:
            (process, connection), self._held = self._held, None
            connection.close()
            end_process(process, wait_s)

    def _start(self) -> tuple[Process, Connection]:
        ours, theirs = Pipe()
        with theirs:
            return start_process([_PROGRAM, str(theirs.fileno())], self._log, self._api_url, theirs.fileno()), ours


def cluster_overrides(child: Child) -> tuple[str, ...]:
    """Those that say which Ray cluster a run uses."""
    return tuple(text for text in child.overrides if override_key(text).partition(".")[0] == "cluster")
