"""A folder that a command writes: free before, whole afterwards, untouched by an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from conf.problems import ConfigError
from infra.durable import sync_folder, sync_tree


def check_free(destination: Path) -> None:
    """`ConfigError` unless `destination` is absent or an empty folder that a rename can replace."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError([f"destination = {destination}: not empty; allowed: an empty folder, or a path that is free"])
    if destination.is_symlink() or destination.is_mount():
        what = "a link" if destination.is_symlink() else "a mount point"
        raise ConfigError([f"destination = {destination}: {what}; allowed: a folder below it, or a path that is free"])


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A staging folder beside `destination`. What the block leaves in its folder `folder` becomes `destination`, whole.

    On an error nothing is left of it.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = destination.parent / f".{destination.name}-{uuid4().hex}.part"
    staging.mkdir()
    try:
        yield staging
        sync_tree(staging / "folder")
        os.replace(staging / "folder", destination)
        sync_folder(destination.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
