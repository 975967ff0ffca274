"""Checkpoints of a trainer: every rank publishes and fetches its own part, and rank 0 decides for all."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.store import CheckpointStore, FileEntry, Manifest, StoreError
from tasks.engines.protocols import EngineError, TrainerEngine
from tasks.ranks import Ranks

log = logging.getLogger(__name__)

Target = tuple[str, Mapping[str, Any]]
"""Url and options of a checkpoint store."""


@dataclass(frozen=True)
class Copy:
    """A checkpoint on the disk of a machine: `state` below `folder`; or why it is not there."""

    folder: Path
    problem: str | None = None

    @property
    def state(self) -> Path:
        return self.folder / "state"


def stage_state(
    engine: TrainerEngine, target: Target, run: str, attempt: str, extra: Mapping[str, bytes]
) -> tuple[FileEntry, ...]:
    """Store what one rank saves, and `extra` files, as its part of an attempt."""
    url, options = target
    with tempfile.TemporaryDirectory(prefix="fp8-grpo-checkpoint-") as folder:
        root = Path(folder)
        engine.save(root)
        for name, content in extra.items():
            (root / name).write_bytes(content)
        files = {path.name: path for path in sorted(root.iterdir())}
        return CheckpointStore(url, options).stage(run, attempt, files)


def publish(
    ranks: Ranks,
    engine: TrainerEngine,
    target: Target,
    run: str,
    step: int,
    extra: Mapping[str, bytes],
    meta: Mapping[str, Any],
) -> Manifest:
    """One checkpoint of all ranks and `extra` files, which exists once every rank has done its part.

    `engine` is rank 0's own.
    """
    store = CheckpointStore(*target)
    attempt = store.begin(run, step)
    own, others = ranks.call(
        "checkpoint",
        "checkpoint_s",
        lambda: stage_state(engine, target, run, attempt, extra),
        lambda _, peer: peer.stage.remote(target, run, attempt),
    )
    return store.commit(run, attempt, [*own, *(entry for part in others.values() for entry in part)], meta)


def fetch_copy(target: Target, manifest: Manifest) -> Copy:
    """The whole checkpoint on this machine's disk, every file verified, or the reason why not."""
    copy = Copy(Path(tempfile.mkdtemp(prefix="fp8-grpo-restore-")))
    try:
        CheckpointStore(*target).fetch(manifest, copy.state)
    except StoreError as error:
        return Copy(copy.folder, str(error))
    return copy


def drop_copy(copy: Copy) -> None:
    """Remove what `fetch_copy` left."""
    shutil.rmtree(copy.folder, ignore_errors=True)


@contextmanager
def _copies(ranks: Ranks, target: Target, manifest: Manifest) -> Iterator[dict[int, Copy]]:
    """A copy for each rank: one on each machine, which its ranks share."""
    holders = {node: rank for rank, node in reversed(tuple(enumerate(ranks.nodes)))}
    first = {rank: holders[node] for rank, node in enumerate(ranks.nodes)}
    own, others = ranks.call(
        "fetch a checkpoint",
        "restore_s",
        lambda: fetch_copy(target, manifest),
        lambda rank, peer: peer.fetch.remote(target, manifest) if first[rank] == rank else None,
    )
    held = {0: own, **others}
    try:
        yield {rank: held[holder] for rank, holder in first.items()}
        ranks.call(
            "drop a fetched checkpoint",
            "restore_s",
            lambda: None,
            lambda rank, peer: peer.drop.remote(held[rank]) if rank in others else None,
        )
    finally:
        drop_copy(own)


def restore(ranks: Ranks, engine: TrainerEngine, target: Target, run: str, step: int | None = None) -> Manifest:
    """Load the newest checkpoint whose content verifies on every machine, on all ranks; `engine` is rank 0's own.

    `step`: that of the only checkpoint to consider, None for all.
    One that does not verify is skipped by all, with a warning; with none left this is an `EngineError`.
    """
    checkpoints, problems = CheckpointStore(*target), []
    for manifest in checkpoints.complete(run):
        if step is not None and manifest.step != step:
            continue
        with _copies(ranks, target, manifest) as copies:
            found = sorted({copy.problem for copy in copies.values() if copy.problem is not None})
            if not found:
                _load(ranks, engine, copies)
        if not found:
            return manifest
        problems += found
        log.warning("checkpoint of step %d is skipped: %s", manifest.step, "; ".join(found))
    raise EngineError(f"run {run} at {target[0]} has no usable checkpoint: {'; '.join(problems) or 'none found'}")


def _load(ranks: Ranks, engine: TrainerEngine, copies: Mapping[int, Copy]) -> None:
    ranks.call(
        "restore",
        "restore_s",
        lambda: engine.load(copies[0].state),
        lambda rank, peer: peer.follow.remote("load", (copies[rank].state,)),
    )
