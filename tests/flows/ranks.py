"""A trainer of several ranks: each computes as the PyTorch trainer does, meets the others in every call, may fail.

Each rank is an actor in a process of its own, and the ranks talk over gloo: what one leaves undone the others wait for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conf.schema import RunConfig, TorchTrainer
from infra.provenance import peak_memory_gb
from infra.store import Manifest
from tasks.actors import TrainerActor
from tasks.engines.protocols import RolloutBatch, Scores, TrainerEngine
from tasks.engines.registry import build_trainer
from tasks.followers import FollowerActor
from tasks.rank_checkpoint import Copy

COLLECTIVE_TIMEOUT_S = 600.0
"""Far longer than a test waits: what ends in time does not end because of it."""


class Trap:
    """What a rank does instead of a method, once it is asked for it."""

    def __init__(self, action: str, marker: Path) -> None:
        self._action, self._marker = action, marker

    def spring(self) -> None:
        self._marker.touch()
        if self._action == "raise":
            raise ValueError("the trap of this rank")
        if self._action == "hang":
            # As a process that waits for a GPU: no error comes, whatever happens to the others.
            threading.Event().wait()


class MeetingEngine:
    """The PyTorch trainer with a meeting of all ranks before each method; rank `r` saves under names of its own."""

    def __init__(self, engine: TrainerEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self.traps: dict[str, Trap] = {}

    @property
    def version(self) -> int:
        return self._engine.version

    def _meet(self, method: str) -> None:
        if method in self.traps:
            self.traps[method].spring()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert int(ones) == dist.get_world_size()

    def score(self, batch: RolloutBatch) -> Scores:
        self._meet("score")
        return self._engine.score(batch)

    def save(self, directory: Path) -> None:
        self._meet("save")
        self._engine.save(directory)
        for path in tuple(directory.iterdir()):
            path.rename(directory / f"{self._rank}-{path.name}")

    def load(self, directory: Path) -> None:
        self._meet("load")
        own = directory.parent / f"of-{self._rank}"
        own.mkdir()
        for path in directory.glob(f"{self._rank}-*"):
            (own / path.name.removeprefix(f"{self._rank}-")).symlink_to(path)
        self._engine.load(own)

    def __getattr__(self, method: str) -> Any:
        def meet_and_run(*arguments: Any) -> Any:
            self._meet(method)
            return getattr(self._engine, method)(*arguments)

        return meet_and_run


def _make(config: RunConfig, model_dir: Path, rank: int, url: str | None) -> Any:
    """`config` is Megatron's, which alone knows ranks; what is built is the PyTorch trainer."""
    ranks = config.trainer.ranks
    if ranks > 1 and not dist.is_initialized():
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=ranks, timeout=limit)
    trainer = TorchTrainer(optimizer=config.trainer.optimizer, threads=1)
    engine = build_trainer(config.model_copy(update={"trainer": trainer}), model_dir)
    return MeetingEngine(engine, rank) if ranks > 1 else engine


class Leader(TrainerActor):
    """Rank 0."""

    def pid(self) -> int:
        return os.getpid()

    def make(self, config: RunConfig, model_dir: Path, rank: int, url: str | None) -> TrainerEngine:
        made: TrainerEngine = _make(config, model_dir, rank, url)
        return made

    def set_trap(self, method: str, action: str, marker: Path) -> None:
        self._own.traps[method] = Trap(action, marker)  # type: ignore[attr-defined]

    def pretend_machines(self, nodes: tuple[str, ...]) -> None:
        self._ranks.nodes = nodes


class Follower(FollowerActor):
    """Any other rank."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.fetched: list[int] = []
        self.refused: int | None = None

    def pid(self) -> int:
        return os.getpid()

    def break_down(self) -> None:
        """Fail when it is built."""
        self.broken = True

    def make(self, config: RunConfig, model_dir: Path, rank: int, url: str) -> TrainerEngine:
        if self.broken:
            raise ValueError("this rank cannot be built")
        made: TrainerEngine = _make(config, model_dir, rank, url)
        return made

    def set_trap(self, method: str, action: str, marker: Path) -> None:
        self._engine.traps[method] = Trap(action, marker)  # type: ignore[attr-defined]

    def refuse(self, step: int | None) -> None:
        """Find the checkpoint of this step damaged."""
        self.refused = step

    def fetch(self, store: tuple[str, Mapping[str, Any]], manifest: Manifest) -> Copy:
        self.fetched.append(manifest.step)
        copy = super().fetch(store, manifest)
        return Copy(copy.folder, "a flipped bit") if manifest.step == self.refused else copy

    def seen(self) -> tuple[list[int], int, float]:
        """Steps that were fetched here, the engine's version, and the peak memory of the process."""
        return self.fetched, self._engine.version, peak_memory_gb()

    def fill(self, gigabytes: float) -> None:
        torch.ones(int(gigabytes * 1e9 / 4))


def wait_for(marker: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not marker.exists():
        assert time.monotonic() < deadline, f"{marker} did not come"
        time.sleep(0.02)
