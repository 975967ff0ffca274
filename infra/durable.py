"""What it takes for a file to survive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def sync_tree(folder: Path) -> None:
    """Make a new folder and the files in it durable."""
    for path in (*sorted(folder.iterdir()), folder):
        sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Make a new or renamed entry of `folder` durable; `fsync` of the file itself does not. A file works, too."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
