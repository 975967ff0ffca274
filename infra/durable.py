"""What it takes for a file to survive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make a new or renamed entry of `folder` durable; `fsync` of the file itself does not."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
