"""MLflow is written from the journal, by one thread off the training path.

The thread follows the journal with a cursor that is a file of its own: every entry is one batch, and the
cursor moves after the store has taken it. An outage delays points and never loses them; what a crash
leaves between batch and cursor is found in the store and not logged again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args
from uuid import uuid4

from infra.journal import Entry, Journal
from infra.mlflow_run import ParamValue, RunSpec, TrackedRun, metrics_of

log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
LONGEST_CLOSING_DELAY_S = 1.0


@dataclass(frozen=True)
class WriterReport:
    """What became of a run in MLflow. pending: entries and artifacts that the store has not taken;
    written: entries that this writer logged; error: the trouble that was there at the end, None if there
    was none.
    """

    pending: int
    written: int
    error: str | None


@dataclass(frozen=True)
class Cursor:
    """How far the store has followed the journal. seq: last entry taken (0: none), told apart from an entry
    of another journal by kind, step and time; token: mark of the run, written before the run is created.
    """

    token: str
    run_id: str | None = None
    seq: int = 0
    kind: str | None = None
    step: int | None = None
    time_ms: int | None = None

    def after(self, entry: Entry) -> Cursor:
        return replace(self, seq=entry.seq, kind=entry.kind, step=entry.step, time_ms=entry.time_ms)

    def fits(self, journal: Journal) -> bool:
        if self.seq == 0:
            return True
        entry = next(iter(journal.since(self.seq - 1)), None)
        return entry is not None and self.after(entry) == self


class MlflowWriter:
    """Brings the numbers of a journal to an MLflow run.

    tracking_uri, experiment, run_name, params, tags: see RunSpec; cursor_path: file beside the journal;
    run_id: the run to go on with, None for the one of the cursor file or else a new one;
    patience_s: how long `close` waits for a store that takes nothing.
    Nothing here raises for an outage; `close` says what is pending. The caller sets the environment of
    MLflow (few HTTP retries, telemetry off) before the thread starts.
    """

    def __init__(
        self,
        tracking_uri: str,
        experiment: str,
        journal: Journal,
        cursor_path: str | os.PathLike[str],
        run_id: str | None,
        run_name: str,
        params: Mapping[str, ParamValue],
        tags: Mapping[str, str],
        patience_s: float,
    ) -> None:
        self._spec = RunSpec(tracking_uri, experiment, run_name, dict(params), dict(tags))
        self._journal = journal
        self._cursor_path = Path(cursor_path)
        self._patience_s = patience_s
        self._cursor = _load_cursor(self._cursor_path, journal, run_id)
        self._run: TrackedRun | None = None
        self._artifacts: deque[tuple[Path, str | None]] = deque()
        self._changed = threading.Condition()
        self._grown = True
        self._closing: Status | None = None
        self._last_tags: dict[str, str] = {}
        self._stop = False
        self._finished = False
        self._written = 0
        self._error: str | None = None
        self._last_success = time.monotonic()
        self._thread = threading.Thread(target=self._follow, name="mlflow-writer", daemon=True)

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until the store has created it."""
        return self._cursor.run_id

    def start(self) -> None:
        """Start the thread; the run is created or reopened there."""
        self._thread.start()

    def notify(self) -> None:
        """Say that the journal has grown."""
        with self._changed:
            self._grown = True
            self._changed.notify_all()

    def wait_run_id(self, timeout: float) -> str | None:
        """The id of the run, waiting up to `timeout` seconds for it."""
        with self._changed:
            self._changed.wait_for(lambda: self.run_id is not None, timeout)
            return self.run_id

    def tag(self, key: str, value: str) -> None:
        """A tag that is set when the writer is closed."""
        with self._changed:
            self._last_tags[key] = value

    def add_artifact(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Queue a local file for the run; it must stay as it is until the writer is closed."""
        source = Path(path).absolute()
        if not source.is_file():
            raise FileNotFoundError(f"{source}: no such file to send to MLflow")
        with self._changed:
            self._artifacts.append((source, artifact_path))
            self._grown = True
            self._changed.notify_all()

    def close(self, status: Status, timeout_s: float) -> WriterReport:
        """Flush, set tags and the status of the run, end the thread. Returns after `timeout_s` at the latest, and
        after `patience_s` without a success. A second call reports the same again.
        """
        if status not in get_args(Status):
            raise ValueError(f"status={status!r}: allowed are {', '.join(get_args(Status))}")
        with self._changed:
            if self._closing is None:
                self._closing = status
                self._last_success = time.monotonic()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < min(deadline, self._give_up_at()):
            self._thread.join(max(0.0, min(0.2, deadline - time.monotonic())))
        with self._changed:
            # A call that hangs may still come back; nothing new is begun after it.
            self._stop = True
            self._changed.notify_all()
            return self._report()

    def _give_up_at(self) -> float:
        with self._changed:
            return self._last_success + self._patience_s

    def _report(self) -> WriterReport:
        behind = self._journal.since(self._cursor.seq)
        pending = sum(1 for entry in behind if metrics_of(entry)) + len(self._artifacts)
        error = self._error
        if error is None and not self._finished:
            error = f"no answer from the store in time; status {self._closing} is not set"
        return WriterReport(pending, self._written, error)

    def _follow(self) -> None:
        delay = FIRST_DELAY_S
        while not self._stop and not self._finished:
            try:
                self._catch_up()
            except Exception as error:
                # The boundary to MLflow: connection, database and protocol errors have no common base.
                self._note_failure(error)
                self._pause(delay)
                delay = min(2 * delay, LONGEST_DELAY_S)
            else:
                delay = FIRST_DELAY_S
                with self._changed:
                    self._changed.wait_for(lambda: self._grown or self._stop or self._closing is not None)

    def _catch_up(self) -> None:
        """One pass over all there is to do; what succeeded stays done when something later fails."""
        with self._changed:
            self._grown = False
        if self._run is None:
            _save_cursor(self._cursor, self._cursor_path)
            self._run = TrackedRun.open(self._spec, self._cursor.token, self._cursor.run_id)
            self._advance(replace(self._cursor, run_id=self._run.run_id), logged=False)
        self._send_entries(self._run)
        failure = self._send_artifacts(self._run)
        with self._changed:
            status = None if self._grown else self._closing
        if status is not None and not self._stop:
            # The last append comes before closing, so this pass over the journal takes everything.
            self._send_entries(self._run)
            self._run.finish(status, self._last_tags)
            if failure is None:
                with self._changed:
                    self._finished = True
                    self._note_success()
        if failure is not None:
            raise failure

    def _send_entries(self, run: TrackedRun) -> None:
        for entry in self._journal.since(self._cursor.seq):
            if self._stop:
                return
            self._advance(self._cursor.after(entry), logged=run.log_entry(entry))

    def _send_artifacts(self, run: TrackedRun) -> Exception | None:
        """Send the queue. An artifact store that fails must not hold up the status: its error is returned."""
        while self._artifacts and not self._stop:
            path, artifact_path = self._artifacts[0]
            try:
                run.log_artifact(path, artifact_path)
            except Exception as error:
                return error
            with self._changed:
                self._artifacts.popleft()
                self._note_success()
        return None

    def _advance(self, cursor: Cursor, logged: bool) -> None:
        if cursor.run_id != self._cursor.run_id:
            # Another run than the cursor was for starts from the first entry; doubles are found in the store.
            cursor = Cursor(cursor.token, cursor.run_id)
        _save_cursor(cursor, self._cursor_path)
        with self._changed:
            self._cursor = cursor
            self._written += logged
            self._note_success()
            self._changed.notify_all()

    def _note_success(self) -> None:
        self._last_success = time.monotonic()
        if self._error is not None:
            log.warning("MLflow takes data again, going on after entry %d", self._cursor.seq)
            self._error = None

    def _note_failure(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        with self._changed:
            if self._error is None:
                log.warning("MLflow does not take data, training goes on and it is tried again: %s", text)
            self._error = text

    def _pause(self, delay: float) -> None:
        """Wait `delay` seconds; shorter once the writer is closing, so that the end is not missed."""
        until = time.monotonic() + delay
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._closing is not None, delay)
            if self._closing is not None:
                left = min(LONGEST_CLOSING_DELAY_S, until - time.monotonic())
                self._changed.wait_for(lambda: self._stop, max(left, 0.1))


def _load_cursor(path: Path, journal: Journal, run_id: str | None) -> Cursor:
    """The cursor of the file where it belongs to this journal and run, else one at the beginning."""
    fresh = Cursor(uuid4().hex, run_id)
    try:
        cursor = Cursor(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return fresh
    except (ValueError, TypeError) as error:
        log.warning("%s: damaged cursor, MLflow is compared from the first entry: %s", path, error)
        return fresh
    if run_id not in (None, cursor.run_id):
        return fresh
    if not cursor.fits(journal):
        log.warning("%s: belongs to another journal, MLflow is compared from the first entry", path)
        return Cursor(cursor.token, cursor.run_id)
    return cursor


def _save_cursor(cursor: Cursor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as writer:
        writer.write(json.dumps(asdict(cursor)))
        writer.flush()
        os.fsync(writer.fileno())
    os.replace(temporary, path)
