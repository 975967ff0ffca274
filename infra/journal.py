"""The journal of a run: an append-only JSON-lines file that is written before anything else.

One line is one entry, durable (flushed and fsynced) before `Journal.append` returns. The file has one
writer at a time, held by an advisory lock that ends with the process; any number of readers may look on.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from infra.durable import sync_folder

log = logging.getLogger(__name__)

Value = float | int | str | bool | None

_KIND = re.compile(r"[a-z][a-z0-9_]*")
_FIELDS = frozenset({"seq", "kind", "step", "values", "time_ms"})


class JournalError(Exception):
    """The journal cannot be read or written as asked; the message names file and line or entry."""


@dataclass(frozen=True)
class Entry:
    """One line of the journal.

    seq: 1 for the first entry, then one more each; step: training step, >= 0; time_ms: wall clock when it
    was appended, milliseconds since the epoch; values: flat, NaN and infinities included.
    """

    seq: int
    kind: str
    step: int
    values: Mapping[str, Value]
    time_ms: int


class Journal:
    """Append-only entries, at most one for each (kind, step). Safe to use from several threads.

    Opening reads and checks the whole file. A torn last line (what a crash in the middle of an append
    leaves) is cut off with a warning; damage anywhere else is a JournalError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._mutex = threading.RLock()
        self._fd: int | None = None
        raw = _read(self._path)
        entries, self._size = _parse(raw, self._path)
        self._entries = list(entries)
        self._index = {(entry.kind, entry.step): entry for entry in entries}
        if self._size < len(raw):
            self._cut_torn_tail(len(raw))

    @property
    def path(self) -> Path:
        return self._path

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, kind: str, step: int, values: Mapping[str, Value], time_ms: int | None = None) -> Entry:
        """Write one entry and return it once it is on the disk. time_ms: None stands for now.

        Raises JournalError when (kind, step) exists, a value is of another type than Value, the file is
        being written by another process, or the disk refuses.
        """
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise JournalError(f"kind={kind!r}: a kind is lower-case letters, digits and underscores")
        if not _is_count(step):
            raise JournalError(f"step={step!r}: a step is an integer >= 0")
        _check_values(values, f"{kind} entry of step {step}")
        now = time.time_ns() // 1_000_000 if time_ms is None else time_ms
        if not _is_count(now):
            raise JournalError(f"time_ms={time_ms!r}: not an integer >= 0")
        with self._mutex:
            known = self._index.get((kind, step))
            if known is not None:
                raise JournalError(
                    f"{self._path}: a {kind} entry of step {step} exists (seq {known.seq}); "
                    "an entry is never written twice"
                )
            entry = Entry(len(self._entries) + 1, kind, step, dict(values), now)
            self._write([entry])
            return entry

    def claim(self) -> None:
        """Take the file for this process now, not at the first append; JournalError when another one writes it."""
        with self._mutex:
            self._writable(self._size)

    def entries(self) -> tuple[Entry, ...]:
        """All entries, oldest first."""
        with self._mutex:
            return tuple(self._entries)

    def since(self, seq: int) -> tuple[Entry, ...]:
        """The entries after number `seq` (0: all), oldest first."""
        with self._mutex:
            return tuple(self._entries[seq:])

    def last(self, kind: str) -> Entry | None:
        """The entry of this kind that was appended last."""
        with self._mutex:
            return next((entry for entry in reversed(self._entries) if entry.kind == kind), None)

    def find(self, kind: str, step: int) -> Entry | None:
        with self._mutex:
            return self._index.get((kind, step))

    def import_copy(self, path: str | os.PathLike[str]) -> None:
        """Take over the entries of another journal file, for a resume where this file is empty.

        Entries that are here already must be the beginning of the copy (then the rest is added, so an
        import that was cut short can be repeated) or go on from its end (then nothing is done). Anything
        else is a JournalError, and this journal stays as it is.
        """
        source = Path(path)
        if not source.is_file():
            raise JournalError(f"{source}: no such journal to import")
        copied, _ = _parse(_read(source), source)
        with self._mutex:
            shared = min(len(copied), len(self._entries))
            for theirs, ours in zip(copied[:shared], self._entries[:shared], strict=True):
                if _encode(theirs) != _encode(ours):
                    raise JournalError(
                        f"{self._path}: entry {ours.seq} ({ours.kind}, step {ours.step}) differs from "
                        f"entry {theirs.seq} of {source}; only an empty journal can take over another one"
                    )
            if copied[shared:]:
                self._write(copied[shared:])

    def close(self) -> None:
        """Let go of the file. Entries can still be read, and a later append opens it again."""
        with self._mutex:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _write(self, entries: Sequence[Entry]) -> None:
        data = b"".join(_encode(entry) for entry in entries)
        fd = self._writable(self._size)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except OSError as error:
            # Whatever part reached the file would be damage in the middle once more is appended.
            os.ftruncate(fd, self._size)
            raise JournalError(f"{self._path}: cannot append: {error}") from error
        self._size += len(data)
        self._entries.extend(entries)
        self._index.update({(entry.kind, entry.step): entry for entry in entries})

    def _writable(self, expected_size: int) -> int:
        """The locked descriptor; JournalError unless the file is still the one that was read."""
        if self._fd is not None:
            return self._fd
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise JournalError(f"{self._path}: cannot open for writing: {error}") from error
        try:
            _lock(fd, self._path)
            size = os.fstat(fd).st_size
            if size != expected_size:
                raise JournalError(
                    f"{self._path}: holds {size} bytes, {expected_size} were read: "
                    "another process has written it since it was opened"
                )
            sync_folder(self._path.parent)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return fd

    def _cut_torn_tail(self, file_size: int) -> None:
        try:
            fd = self._writable(file_size)
        except _Locked:
            # A live writer is in the middle of an append: its tail is not ours to cut.
            return
        log.warning(
            "%s: the last line is torn (%d bytes), cut off after entry %d",
            self._path,
            file_size - self._size,
            len(self._entries),
        )
        os.ftruncate(fd, self._size)
        os.fsync(fd)


class _Locked(JournalError):
    """Another open journal object, in this process or another one, writes the file."""


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _Locked(f"{path}: another process is writing this journal") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise JournalError(f"{path}: cannot read the journal: {error}") from error


def _parse(raw: bytes, path: Path) -> tuple[tuple[Entry, ...], int]:
    """All whole entries and the number of bytes that they fill."""
    lines = raw.split(b"\n")
    tail = lines.pop()
    entries: list[Entry] = []
    seen: set[tuple[str, int]] = set()
    size = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not tail:
                break
            raise JournalError(f"{path}, line {number}: not JSON: {error}") from error
        try:
            entry = _entry(record, number)
            if (entry.kind, entry.step) in seen:
                raise JournalError(f"a second {entry.kind} entry of step {entry.step}")
        except JournalError as error:
            raise JournalError(f"{path}, line {number}: {error}") from error
        seen.add((entry.kind, entry.step))
        entries.append(entry)
        size += len(line) + 1
    return tuple(entries), size


def _entry(record: object, number: int) -> Entry:
    if not isinstance(record, dict) or record.keys() != _FIELDS:
        raise JournalError(f"not an entry: an entry has the keys {', '.join(sorted(_FIELDS))}")
    if record["seq"] != number:
        raise JournalError(f"seq={record['seq']!r}, expected {number}")
    if not isinstance(record["kind"], str) or not _is_count(record["step"]):
        raise JournalError(f"kind={record['kind']!r}, step={record['step']!r}: not a name and a step >= 0")
    if not _is_count(record["time_ms"]):
        raise JournalError(f"time_ms={record['time_ms']!r}: not an integer >= 0")
    if not isinstance(record["values"], dict):
        raise JournalError(f"values={record['values']!r}: not a mapping")
    _check_values(record["values"], "values")
    return Entry(**record)


def _check_values(values: Mapping[str, Value], where: str) -> None:
    for key, value in values.items():
        if not isinstance(key, str):
            raise JournalError(f"{where}: key {key!r} is not a string")
        if not isinstance(value, float | int | str | bool | None):
            raise JournalError(
                f"{where}: {key}={value!r} is a {type(value).__name__}; allowed are float, int, str, bool and None"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _encode(entry: Entry) -> bytes:
    return (json.dumps(asdict(entry), separators=(",", ":")) + "\n").encode("ascii")
