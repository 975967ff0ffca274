"""A checkpoint store in a test: the place that it is at, and files to put there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec

from infra.store import CheckpointStore, Manifest

RUN = "run-1"
FILES = {"weights.bin": b"w" * 5000, "state/optimizer.bin": b"\0\1" * 700, "journal.jsonl": b""}
META = {"step": 3, "config_digest": "ab", "scales": {"layer.0": [1.5, 2.0]}, "run_id": None, "done": False}


class Place:
    """A store and a direct way to its files, past the store's own code."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url, self.options = url, dict(options)
        self.store = CheckpointStore(url, options)
        self.fs, self.root = fsspec.core.url_to_fs(url, **({"use_listings_cache": False, **options} if options else {}))

    def write(self, name: str, data: bytes) -> None:
        self.fs.makedirs(f"{self.root}/{name}".rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(f"{self.root}/{name}", data)

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(f"{self.root}/{name}")

    def remove(self, name: str) -> None:
        self.fs.rm_file(f"{self.root}/{name}")

    def names(self) -> set[str]:
        prefix = f"{self.root}/"
        return {path.removeprefix(prefix) for path in self.fs.find(self.root) if path.startswith(prefix)}


def write_files(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return {name: folder / name for name in contents}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def attempt_path(manifest: Manifest, name: str) -> str:
    return f"{manifest.run}/attempts/{manifest.attempt}/{name}"
