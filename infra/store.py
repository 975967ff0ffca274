"""Checkpoints in a file system or an S3 bucket, whole or not at all.

Layout below the url of the store:
    {run}/attempts/{step:08d}-{uuid}/...       the files of one attempt to publish
    {run}/manifests/{step:08d}-{uuid}.json     written last: sizes and sha256 of every file of the attempt
    {run}/LATEST                               name of the newest manifest, a hint for people and tools
A checkpoint exists when its manifest does and every file is there with its size. Whatever a crash leaves
behind has no manifest and is never read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.store_files import StoreFiles

log = logging.getLogger(__name__)

_RUN = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]+")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_ATTEMPT = re.compile(r"(\d{8,})-[0-9a-f]{32}")


class StoreError(Exception):
    """A checkpoint could not be written, read or verified; the message names what and where."""


class FileEntry(BaseModel):
    """One file of a checkpoint: path inside it, size in bytes, sha256 of the content in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(pattern=rf"^{_FILE.pattern}$")
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """What one complete checkpoint holds. created_at: UTC, ISO 8601, sorts as text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    run: str
    step: int = Field(ge=0)
    attempt: str = Field(pattern=rf"^{_ATTEMPT.pattern}$")
    created_at: str
    files: tuple[FileEntry, ...] = Field(min_length=1)
    meta: dict[str, Any]


class CheckpointStore:
    """Checkpoints of any number of runs below one url: a plain path, `file://` or `s3://bucket/prefix`.

    options go to fsspec (endpoint_url, key, secret, ...). Every method raises StoreError and nothing else; a
    store that does not answer is an error, never an empty store. Nothing is contacted by the constructor.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        with _as_store_error(f"opening {url}"):
            self._files = StoreFiles(url, options or {})

    def check(self) -> None:
        """Write, read back and remove a small file, so that a store that refuses is found before training."""
        name = f".probe-{uuid4().hex}"
        with _as_store_error(f"writing to {self.url}"):
            self._files.write(name.encode(), name, staging="")
            if self._files.read(name) != name.encode():
                raise StoreError(f"{self.url}: a file that was written did not read back as it was")
            self._files.remove(name)

    def publish(self, run: str, step: int, files: Mapping[str, Path], meta: Mapping[str, Any]) -> Manifest:
        """Store `files` (path inside the checkpoint -> local file) as a checkpoint of `run` at `step`.

        The files must not change meanwhile. meta must be plain JSON (string keys, finite numbers) and comes
        back equal, tuples as lists. When this raises, no new checkpoint exists.
        """
        _check_run(run)
        _check_request(step, files)
        plain = _plain(meta, "meta")
        attempt = self.begin(run, step)
        return self.commit(run, attempt, self.stage(run, attempt, files), plain)

    def begin(self, run: str, step: int) -> str:
        """Name of a new attempt to publish `run` at `step` from several processes.

        Nothing is written here: each process calls `stage`, then one of them `commit`.
        """
        _check_run(run)
        _check_step(step)
        return f"{step:08d}-{uuid4().hex}"

    def stage(self, run: str, attempt: str, files: Mapping[str, Path]) -> tuple[FileEntry, ...]:
        """Store a part of an attempt's files (as in `publish`); what is returned goes to `commit`.

        Until then they are in no checkpoint, and `prune` removes those that never were.
        """
        _check_run(run)
        _check_files(files)
        step, where = _step_of(attempt), f"{run}/attempts/{attempt}"
        with _as_store_error(f"publishing step {step} of run {run} to {self.url}"):
            entries = tuple(_describe(name, Path(source)) for name, source in sorted(files.items()))
            for entry in entries:
                self._files.put(Path(files[entry.path]), f"{where}/{entry.path}")
        return entries

    def commit(self, run: str, attempt: str, entries: Iterable[FileEntry], meta: Mapping[str, Any]) -> Manifest:
        """Make a checkpoint of all that was staged for `attempt`; StoreError, and none, unless it is all there once."""
        _check_run(run)
        plain, files = _plain(meta, "meta"), tuple(sorted(entries, key=lambda entry: entry.path))
        step, where = _step_of(attempt), f"{run}/attempts/{attempt}"
        what = f"publishing step {step} of run {run} to {self.url}"
        with _as_store_error(what):
            if not files:
                raise StoreError(f"{what}: files={{}}: a checkpoint has at least one file")
            for entry, following in pairwise(files):
                if entry.path == following.path:
                    raise StoreError(f"{what}: {entry.path} was staged twice")
            problem = _difference(files, self._files.sizes(where))
            if problem is not None:
                raise StoreError(f"{what}: {problem}")
            manifest = Manifest(
                run=run,
                step=step,
                attempt=attempt,
                created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
                files=files,
                meta=plain,
            )
            self._files.write(_encode(manifest), _manifest_path(run, attempt), staging=where)
        self._point_to(run, attempt)
        return manifest

    def latest(self, run: str) -> Manifest | None:
        """The newest complete checkpoint: highest step, then the latest written. None: there is none."""
        newest = next(self.complete(run), None)
        if newest is not None:
            with _as_store_error(f"reading the pointer of run {run} at {self.url}"):
                pointer = self._pointer(run)
            if pointer != newest.attempt:
                log.warning(
                    "%s/%s/LATEST says %s, the newest complete checkpoint is %s: the pointer is not followed",
                    self.url,
                    run,
                    pointer,
                    newest.attempt,
                )
        return newest

    def complete(self, run: str) -> Iterator[Manifest]:
        """All complete checkpoints of a run, newest first; damaged and half ones are skipped with a warning.

        Sizes are compared here; `fetch` compares the content too.
        """
        _check_run(run)
        with _as_store_error(f"listing the checkpoints of run {run} at {self.url}"):
            by_step: dict[int, list[str]] = {}
            for attempt in self._manifests(run):
                by_step.setdefault(_step_of(attempt), []).append(attempt)
            for step in sorted(by_step, reverse=True):
                read = [self._read_manifest(run, attempt) for attempt in by_step[step]]
                whole = [manifest for manifest in read if manifest is not None and self._is_whole(manifest)]
                yield from sorted(whole, key=lambda m: (m.created_at, m.attempt), reverse=True)

    def fetch(self, manifest: Manifest, destination: Path) -> None:
        """Copy all files of a checkpoint into `destination` (absent or empty), each verified by its sha256.

        On an error `destination` stays as it was.
        """
        what = f"step {manifest.step} of run {manifest.run}"
        with _as_store_error(f"fetching {what} from {self.url}"):
            if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
                raise StoreError(f"{destination}: not an empty folder, {what} cannot be fetched into it")
            destination.parent.mkdir(parents=True, exist_ok=True)
            staging = destination.parent / f".{destination.name}-{uuid4().hex}.part"
            try:
                for entry in manifest.files:
                    self._fetch_one(manifest, entry, staging / entry.path)
                os.replace(staging, destination)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def runs(self) -> tuple[str, ...]:
        """Names of the runs that have a manifest, sorted."""
        with _as_store_error(f"listing the runs at {self.url}"):
            names = self._files.children("")
            return tuple(name for name in names if _RUN.fullmatch(name) and self._manifests(name))

    def prune(self, run: str, keep_last: int) -> None:
        """Keep the newest `keep_last` complete checkpoints of a run and remove older ones.

        Manifests go before files, so that no manifest ever lacks its files. What failed attempts left goes
        too, but only below the step of the newest complete checkpoint: above it may be one being written.
        """
        if not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1:
            raise StoreError(f"keep_last={keep_last!r}: an integer >= 1, the newest checkpoint always stays")
        complete = list(self.complete(run))
        if not complete:
            return
        with _as_store_error(f"pruning run {run} at {self.url}"):
            for manifest in complete[keep_last:]:
                self._files.remove(_manifest_path(run, manifest.attempt))
            dropped = {manifest.attempt for manifest in complete[keep_last:]}
            for attempt in self._without_manifest(run):
                if attempt in dropped or _step_of(attempt) < complete[0].step:
                    self._files.remove_folder(f"{run}/attempts/{attempt}")

    def remove_unfinished(self, run: str, older_than_s: float) -> int:
        """Remove what failed attempts left below the step of the newest complete checkpoint; returns how many.

        Only those in which nothing was written for `older_than_s` seconds: another process may be writing one, below
        that step, too, where the run went back to an earlier checkpoint.
        """
        newest, removed = next(self.complete(run), None), 0
        if newest is None:
            return 0
        with _as_store_error(f"pruning run {run} at {self.url}"):
            for attempt in self._without_manifest(run):
                where = f"{run}/attempts/{attempt}"
                if _step_of(attempt) < newest.step and self._files.last_written(where) < time.time() - older_than_s:
                    self._files.remove_folder(where)
                    removed += 1
        return removed

    def manifest_url(self, manifest: Manifest) -> str:
        """Where the manifest lies."""
        return f"{self.url.rstrip('/')}/{_manifest_path(manifest.run, manifest.attempt)}"

    def _without_manifest(self, run: str) -> tuple[str, ...]:
        # A manifest that cannot be read or lacks a file is left to people, and so are its files.
        attempts, kept = self._files.children(f"{run}/attempts"), set(self._manifests(run))
        return tuple(name for name in attempts if _ATTEMPT.fullmatch(name) and name not in kept)

    def _manifests(self, run: str) -> tuple[str, ...]:
        names = (name.removesuffix(".json") for name in self._files.children(f"{run}/manifests"))
        return tuple(name for name in names if _ATTEMPT.fullmatch(name))

    def _read_manifest(self, run: str, attempt: str) -> Manifest | None:
        path = _manifest_path(run, attempt)
        try:
            manifest = Manifest.model_validate_json(self._files.read(path))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            log.warning("%s/%s is damaged and skipped: %s", self.url, path, error.errors()[0]["msg"])
            return None
        if (manifest.run, manifest.attempt, manifest.step) != (run, attempt, _step_of(attempt)):
            log.warning("%s/%s belongs to %s/%s and is skipped", self.url, path, manifest.run, manifest.attempt)
            return None
        return manifest

    def _is_whole(self, manifest: Manifest) -> bool:
        where = f"{manifest.run}/attempts/{manifest.attempt}"
        problem = _difference(manifest.files, self._files.sizes(where))
        if problem is not None:
            log.warning("%s/%s is not complete and skipped: %s", self.url, where, problem)
        return problem is None

    def _fetch_one(self, manifest: Manifest, entry: FileEntry, target: Path) -> None:
        name = f"{manifest.run}/attempts/{manifest.attempt}/{entry.path}"
        try:
            self._files.get(name, target)
        except FileNotFoundError as error:
            raise StoreError(f"{self.url}/{name}: missing, want sha256 {entry.sha256}") from error
        got = _sha256(target)
        if got != entry.sha256:
            raise StoreError(f"{self.url}/{name}: want sha256 {entry.sha256}, got {got}")

    def _pointer(self, run: str) -> str | None:
        try:
            return self._files.read(f"{run}/LATEST").decode(errors="replace").strip()
        except FileNotFoundError:
            return None

    def _point_to(self, run: str, attempt: str) -> None:
        try:
            with _as_store_error(f"writing {run}/LATEST at {self.url}"):
                staging = f"{run}/attempts/{attempt}"
                self._files.write(f"{attempt}\n".encode(), f"{run}/LATEST", staging)
        except StoreError as error:
            # The manifest stands, so the checkpoint does; readers do not need the pointer.
            log.warning("%s", error)


@contextmanager
def _as_store_error(action: str) -> Iterator[None]:
    """Turn what file systems and S3 clients raise (no common base class) into a StoreError."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"{action}: {type(error).__name__}: {error}") from error


def _check_run(run: str) -> None:
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise StoreError(f"run={run!r}: a run name is made of letters, digits, '.', '_' and '-'")


def _check_request(step: int, files: Mapping[str, Path]) -> None:
    _check_step(step)
    if not files:
        raise StoreError("files={}: a checkpoint has at least one file")
    _check_files(files)


def _check_step(step: int) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise StoreError(f"step={step!r}: a step is an integer >= 0")


def _check_files(files: Mapping[str, Path]) -> None:
    for name in files:
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise StoreError(
                f"files: {name!r} is not a relative path of letters, digits, '.', '_' and '-' "
                "whose parts do not begin with '.' or '-'"
            )


def _plain(value: object, key: str) -> Any:
    """A copy of `value` as JSON gives it back; StoreError for what JSON would change or refuse."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise StoreError(f"{key}: key {name!r} is a {type(name).__name__}, JSON keeps strings only")
        return {name: _plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{index}]") for index, item in enumerate(value)]
    raise StoreError(
        f"{key}={value!r} ({type(value).__name__}): allowed: None, bool, int, finite float, str, list, dict"
    )


def _encode(manifest: Manifest) -> bytes:
    return (json.dumps(manifest.model_dump(), indent=1, allow_nan=False) + "\n").encode("ascii")


def _manifest_path(run: str, attempt: str) -> str:
    return f"{run}/manifests/{attempt}.json"


def _step_of(attempt: str) -> int:
    return int(attempt.partition("-")[0])


def _describe(name: str, source: Path) -> FileEntry:
    if not source.is_file():
        raise StoreError(f"files: {name}={source}: no such file")
    return FileEntry(path=name, size=source.stat().st_size, sha256=_sha256(source))


def _sha256(path: Path) -> str:
    with path.open("rb") as reader:
        return hashlib.file_digest(reader, "sha256").hexdigest()


def _difference(want: tuple[FileEntry, ...], sizes: Mapping[str, int]) -> str | None:
    """The first file that is missing or has another size, in words; None when all are right."""
    for entry in want:
        got = sizes.get(entry.path)
        if got is None:
            return f"{entry.path} is missing"
        if got != entry.size:
            return f"{entry.path} has {got} bytes, want {entry.size}"
    return None
