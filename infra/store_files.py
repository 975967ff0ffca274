"""Files of a checkpoint store, on a local disk or in an S3 bucket, behind one small class.

Both go through fsspec. What differs is how a file becomes visible whole or not at all: on a disk by a
temporary name, fsync and rename; on S3 by one put (or one multipart upload that ends in a commit).
Names are relative to the root of the store, with forward slashes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from fsspec.core import url_to_fs

from infra.durable import sync_folder

S3_ATTEMPTS = 4
"""Tries of one S3 call. Only s3fs repeats; botocore beneath it tries once, so the two do not multiply."""


class StoreFiles:
    """Read and write below `url`: a plain path, `file://` or `s3://bucket/prefix`.

    Raises ValueError for another protocol or an option the file system does not take; the calls raise
    OSError (FileNotFoundError, PermissionError) or what the S3 client raises.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        protocol = url.partition("://")[0] if "://" in url else "file"
        if protocol not in ("file", "s3") or "::" in url or not url.removeprefix(f"{protocol}://"):
            raise ValueError(f"{url!r} is no storage url: allowed are a path, file://PATH and s3://BUCKET/PREFIX")
        self.local = protocol == "file"
        settings = dict(options) if self.local else _s3_settings(options)
        self._fs, root = url_to_fs(url, **settings)
        if not self.local:
            self._fs.retries = S3_ATTEMPTS
        self.root = str(root).rstrip("/")

    def full(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def put(self, source: Path, name: str) -> None:
        """Copy one local file to `name`; on return it is durable under that name."""
        target = self.full(name)
        if not self.local:
            self._fs.put_file(str(source), target)
            return
        _make_folder(Path(target).parent)
        with source.open("rb") as reader, Path(target).open("wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
        sync_folder(Path(target).parent)

    def write(self, data: bytes, name: str, staging: str) -> None:
        """Write `name` so that no reader ever sees a part. `staging`: folder for the temporary file."""
        target = self.full(name)
        if not self.local:
            self._fs.pipe_file(target, data)
            return
        temporary = Path(self.full(staging)) / f".{uuid4().hex}.tmp"
        _make_folder(temporary.parent)
        _make_folder(Path(target).parent)
        with temporary.open("wb") as writer:
            writer.write(data)
            writer.flush()
            os.fsync(writer.fileno())
        os.replace(temporary, target)
        sync_folder(Path(target).parent)

    def read(self, name: str) -> bytes:
        data: bytes = self._fs.cat_file(self.full(name))
        return data

    def get(self, name: str, destination: Path) -> None:
        destination.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(self.full(name), str(destination))

    def sizes(self, name: str) -> dict[str, int]:
        """Every file below the folder `name` by its path relative to that folder, with its size in bytes."""
        prefix = self.full(name) + "/"
        found = self._fs.find(self.full(name), detail=True)
        return {
            path.removeprefix(prefix): int(info["size"])
            for path, info in found.items()
            if path.startswith(prefix) and info["type"] == "file"
        }

    def last_written(self, name: str) -> float:
        """Seconds since the epoch at which a file below the folder `name` was last written; 0 where there is none."""
        found = self._fs.find(self.full(name), detail=True).values()
        times = (info["mtime"] if self.local else info["LastModified"].timestamp() for info in found)
        return max(map(float, times), default=0.0)

    def children(self, name: str) -> tuple[str, ...]:
        """The names directly below the folder `name`, sorted; empty when there is no such folder.

        A bucket that does not exist raises FileNotFoundError: its name is more likely wrong than new.
        """
        try:
            rows = self._fs.ls(self.full(name), detail=True)
        except FileNotFoundError:
            if not self.local:
                self._fs.info(self.root.partition("/")[0])
            return ()
        names = (str(row["name"]).rstrip("/").rpartition("/")[2] for row in rows)
        return tuple(sorted(child for child in names if child))

    def remove(self, name: str) -> None:
        """Remove one file; one that is gone already is no error."""
        try:
            self._fs.rm_file(self.full(name))
        except FileNotFoundError:
            return

    def remove_folder(self, name: str) -> None:
        """Remove the folder `name` and all below it."""
        if self.local:
            shutil.rmtree(self.full(name), ignore_errors=False)
            return
        for path in self.sizes(name):
            self.remove(f"{name}/{path}")


def absolute_url(url: str) -> str:
    """A storage url that means the same in every process: a plain path is made absolute."""
    return url if "://" in url else str(Path(url).resolve())


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, each new name durable in the folder above it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def _s3_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(options)
    client = dict(settings.pop("config_kwargs", None) or {})
    client = {"retries": {"total_max_attempts": 1}, "connect_timeout": 5, "read_timeout": 60} | client
    # Listing caches of s3fs do not see what another process wrote; a shared instance would carry our retries.
    return {"use_listings_cache": False, "skip_instance_cache": True} | settings | {"config_kwargs": client}
