"""What engines are at when they are given up: the stack of each thread, which faulthandler writes on a signal.

A process that hangs in Python, or in C with or without the interpreter's lock, still does this; one that is stopped
does not.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from conf.schema import Cluster
from infra.worker_python import on_node

_SIGNAL: Final = signal.SIGUSR1
_WAIT_S: Final = 3.0
"""Within which a process has written its stacks, or will not."""

_SETTLED_S: Final = 0.2
_ANSWER_S: Final = 20.0
"""Within which another machine has read them; all are asked at once."""


@dataclass(frozen=True)
class Place:
    """A process that writes its stacks: its node (Ray's id), the descriptor of its file, which has no name, and the
    file's device and inode, by which the process is known: the signal would end another."""

    node: str
    pid: int
    descriptor: int
    device: int
    inode: int


def arm(actor: Any) -> Place:
    """In the process of an actor: from now on it writes its stacks when it gets the signal. A second call is none."""
    if not hasattr(actor, "stack_file"):
        actor.stack_file = TemporaryFile()  # noqa: SIM115, for as long as the process
        faulthandler.register(_SIGNAL, file=actor.stack_file)
    descriptor = actor.stack_file.fileno()
    held = os.fstat(descriptor)
    return Place(ray.get_runtime_context().get_node_id(), os.getpid(), descriptor, held.st_dev, held.st_ino)


def read_stacks(place: Place, wait_s: float = _WAIT_S) -> str:
    """On the machine of `place` (Linux): its stacks as they are now, or why there are none."""
    file = Path(f"/proc/{place.pid}/fd/{place.descriptor}")
    try:
        held = file.stat()
        if (held.st_dev, held.st_ino) != (place.device, place.inode):
            return f"no stacks: process {place.pid} is another\n"
        start, end = held.st_size, time.monotonic() + wait_s
        os.kill(place.pid, _SIGNAL)
        size, changed = start, time.monotonic()
        while time.monotonic() < end and (size == start or time.monotonic() < changed + _SETTLED_S):
            time.sleep(0.02)
            if (now := file.stat().st_size) != size:
                size, changed = now, time.monotonic()
        with file.open("rb") as reader:
            reader.seek(start)
            written = reader.read().decode(errors="replace")
        status = Path(f"/proc/{place.pid}/status").read_text()
    except OSError as error:
        return f"no stacks: {error}\n"
    state = re.search(r"^State:\s*(.*)$", status, re.MULTILINE)
    return written or f"no stacks within {wait_s:g} s: the process is in state {state[1] if state else 'unknown'}\n"


class StackDumps:
    """Writes the stacks of a run's engines into `folder`, those on other machines of the joined Ray among them."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder = folder
        self._python = cluster.worker_python
        self._places: dict[str, Any] = {}
        self.written: list[Path] = []

    def arm(self, who: str, handle: ActorHandle) -> None:
        """Follow the process of an actor, in the place of the one that was `who` before; does not wait for it."""
        self._places[who] = handle.__ray_call__.remote(arm)

    def write(self, phase: str) -> str:
        """A new file with the stacks of all engines, for a phase that is given up: its path, or why there is none."""
        name = re.sub(r"[^a-z0-9]+", "-", phase.lower()).strip("-")
        path = self._folder / f"stacks-{name}-{time.strftime('%Y%m%dT%H%M%S')}.txt"
        with ThreadPoolExecutor(len(self._places) or 1) as pool:
            found = pool.map(self._stacks, self._places.values())
            parts = [f"== {who}\n{text}" for who, text in zip(self._places, found, strict=True)]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(parts), encoding="utf-8")
        except OSError as error:
            return f"not written: {error}"
        self.written.append(path)
        return str(path)

    def _stacks(self, ref: Any) -> str:
        try:
            place: Place = ray.get(ref, timeout=1.0)
            head = f"pid {place.pid} on node {place.node}\n"
            if place.node == _here():
                return head + read_stacks(place)
            return head + on_node(place.node, read_stacks, _ANSWER_S, self._python)(place)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            # Ray's own text is the traceback of its worker; its last line says what happened.
            return (
                f"no stacks: {type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[-1]}\n"
            )


def _here() -> str:
    return str(ray.get_runtime_context().get_node_id())
