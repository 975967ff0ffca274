"""The Ray actor of a trainer's rank other than 0, and how all ranks are built together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import ray
from ray.util import get_node_ip_address

from conf.schema import RunConfig
from infra.provenance import peak_memory_gb
from infra.store import FileEntry, Manifest
from tasks.engines.protocols import EngineError, TrainerEngine
from tasks.engines.registry import build_trainer
from tasks.rank_checkpoint import Copy, drop_copy, fetch_copy, stage_state
from tasks.ranks import LedEngine, Ranks
from tasks.rendezvous import Meeting, arrive, use_interface_of

FOLLOWED: Final = frozenset({"export_weights", "score", "train", "calibrate", "report", "offload", "save", "load"})
"""Methods of an engine that all ranks run together."""

Builder = Callable[[RunConfig, Path, int, str | None], TrainerEngine]


class FollowerActor:
    """A rank of the trainer that does what rank 0 tells it, while rank 0 does the same."""

    def __init__(self) -> None:
        self._built: TrainerEngine | None = None

    def ping(self) -> str:
        return "trainer"

    def arrive(self, url: str, rank: int, timeout_s: float) -> str:
        """Come to rank 0's meeting; returns this machine's id."""
        use_interface_of(get_node_ip_address())
        arrive(url, rank, timeout_s)
        return node_id()

    def build(self, config: RunConfig, model_dir: str, rank: int, url: str) -> float:
        """Build or replace the engine of `rank`; returns the peak memory of this process (GB)."""
        self._built = None
        self._built = self.make(config, Path(model_dir), rank, url)
        return peak_memory_gb()

    def make(self, config: RunConfig, model_dir: Path, rank: int, url: str) -> TrainerEngine:
        return build_trainer(config, model_dir, rank, url)

    @property
    def _engine(self) -> TrainerEngine:
        if self._built is None:
            raise EngineError("this rank of the trainer was not built")
        return self._built

    def follow(self, method: str, arguments: tuple[Any, ...]) -> float:
        """Run one of `FOLLOWED`; its result is rank 0's to give. Returns the peak memory of this process (GB)."""
        if method not in FOLLOWED:
            raise EngineError(f"follow: {method!r}: allowed: {', '.join(sorted(FOLLOWED))}")
        getattr(self._engine, method)(*arguments)
        return peak_memory_gb()

    def stage(self, store: tuple[str, Mapping[str, Any]], run: str, attempt: str) -> tuple[FileEntry, ...]:
        """See `stage_state`."""
        return stage_state(self._engine, store, run, attempt, {})

    def fetch(self, store: tuple[str, Mapping[str, Any]], manifest: Manifest) -> Copy:
        """See `fetch_copy`."""
        return fetch_copy(store, manifest)

    def drop(self, copy: Copy) -> None:
        """See `drop_copy`."""
        drop_copy(copy)


def node_id() -> str:
    """The machine that this actor is on."""
    found: str = ray.get_runtime_context().get_node_id()
    return found


def build_ranks(
    config: RunConfig, model_dir: str, ranks: Ranks, builder: Builder
) -> tuple[TrainerEngine, TrainerEngine]:
    """Rank 0's engine and the engine that is all ranks; the same one where there is one rank.

    `RankError` names a rank that does not come within `cluster.startup_timeout_s`, dies, or cannot be built.
    """
    wanted = config.trainer.ranks
    if ranks.size != wanted:
        raise EngineError(f"trainer.ranks = {wanted}: {ranks.size} processes were started")
    if wanted == 1:
        alone = builder(config, Path(model_dir), 0, None)
        return alone, alone
    host, limit = get_node_ip_address(), config.cluster.startup_timeout_s
    use_interface_of(host)
    # Open until the engines have joined it: in between the port must not pass to anybody else.
    with closing(Meeting(host, wanted, limit)) as meeting:
        url = meeting.url
        _, nodes = ranks.call("start", "build_s", meeting.wait, lambda rank, peer: peer.arrive.remote(url, rank, limit))
        ranks.nodes = (node_id(), *(nodes[rank] for rank in range(1, wanted)))
        local, peaks = ranks.call(
            "build",
            "build_s",
            lambda: builder(config, Path(model_dir), 0, url),
            lambda rank, peer: peer.build.remote(config, model_dir, rank, url),
        )
    ranks.peak_gb = max(peaks.values())
    return local, LedEngine(local, ranks)
