"""A second Python environment for tests: this one's packages by link, less those of a driver."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

DRIVER_ONLY = ("prefect", "mlflow", "hydra", "reasoning_gym", "math_verify", "matplotlib")
"""Modules of a driver that the engines' actors must do without."""


def worker_environment(folder: Path) -> Path:
    """Make an environment whose `site-packages` lacks `DRIVER_ONLY`; returns its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    here = Path(sysconfig.get_path("purelib"))
    there = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for entry in here.iterdir():
        name = entry.name.lower().replace("-", "_")
        if name != "__pycache__" and not any(name == left or name.startswith(f"{left}_") for left in DRIVER_ONLY):
            (there / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
