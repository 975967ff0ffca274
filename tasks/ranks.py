"""A trainer of several ranks as one: every call goes to all of them, and a failure comes back by its rank.

Rank 0 leads. Its engine lives in a thread of its own, because a rank that failed leaves the others in a collective:
gloo notices a death and nothing else, NCCL not even that. The leader's main thread watches all ranks and returns,
whatever hangs. Behind it stands the timeout of the collectives, after which gloo raises an error and NCCL's own
watchdog ends the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from torch import Tensor
from torch.distributed import DistError

from conf.schema import Deadlines, Recipe
from tasks.deadlines import LateAnswer, LimitName, limit_of
from tasks.deaths import told as told_death
from tasks.engines.protocols import (
    EngineError,
    EngineReport,
    RolloutBatch,
    Scores,
    SyncPayload,
    TokenRows,
    TrainerEngine,
)

T = TypeVar("T")
Start = Callable[[int, ActorHandle], Any]
"""Starts a peer's part of a call: its rank and handle to a reference, or None for a rank that takes no part."""

_GRACE_S = 30.0
"""Longest wait, after an error that only another rank's failure explains, for that failure: Ray needs about this long
to find that a machine is gone."""
_SETTLE_S = 1.0
"""Wait after an error of a rank's own for that of another, or for a death, which explains more."""
_DEATH, _OWN, _CONSEQUENCE = 0, 1, 2
"""What an error is, by how much it explains: the end of a process, an error of the rank's own, or what the failure of
another brings about."""


class RankError(EngineError):
    """A rank of the trainer failed or died; the message names it."""


class LateRankError(RankError, LateAnswer):
    """A rank of the trainer did not answer in time; the message names it."""


class _EngineThread:
    """One thread that does what it is given, in order. A stuck one does not keep the process from ending."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="trainer-engine", daemon=True).start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # Whatever it is, the thread that waits has to have it.
                future.set_exception(error)
            del item, work, future


class Ranks:
    """Rank 0, in this process, and the actors of the others. Without others every call is a plain local one.

    `nodes`: the machine of each rank, as far as it is known; ranks on one share its disk.
    """

    def __init__(self, peers: Sequence[ActorHandle] = (), deadlines: Deadlines | None = None) -> None:
        self._deadlines = deadlines or Deadlines()
        self._peers = dict(enumerate(peers, 1))
        self._thread = _EngineThread() if peers else None
        self._failed: str | None = None
        self.nodes: tuple[str, ...] = ("",) * self.size
        self.peak_gb = 0.0
        """Largest memory that a peer has reported (GB)."""

    @property
    def size(self) -> int:
        return 1 + len(self._peers)

    def close(self) -> None:
        """No more calls."""
        if self._thread is not None:
            self._thread.close()
            self._failed = "closed"

    def call(self, what: str, name: LimitName, local: Callable[[], T], start: Start) -> tuple[T, dict[int, Any]]:
        """Run `local` here and what `start` starts on the others, all at the same time; their results by rank.

        `RankError` when one fails or dies: at once, whatever the others are waiting for, and for every later call.
        `LateRankError` names those that take longer than the deadline `name`; without others there is none here.
        """
        if self._thread is None:
            return local(), {}
        if self._failed is not None:
            raise RankError(f"{what}: the ranks of the trainer cannot go on: {self._failed}")
        refs = {rank: ref for rank, peer in self._peers.items() if (ref := start(rank, peer)) is not None}
        futures: dict[int, Future[Any]] = {0: self._thread.submit(local)}
        futures |= {rank: ref.future() for rank, ref in refs.items()}
        limit = limit_of(self._deadlines, name)
        errors = _outcome(futures, limit.seconds)
        silent = sorted(rank for rank, future in futures.items() if not future.done())
        if errors:
            self._fail(what, errors, silent)
        if silent:
            self._give_up(f"{_named(silent)} of {self.size}, {what}: {limit.missed()}")
        return futures[0].result(), {rank: futures[rank].result() for rank in refs}

    def _fail(self, what: str, errors: Mapping[int, BaseException], silent: Sequence[int]) -> None:
        least = min(map(_weight, errors.values()))
        told: dict[str, list[int]] = {}
        for rank, error in sorted(errors.items()):
            if _weight(error) == least:
                told.setdefault(_described(error), []).append(rank)
        # Several where one rank's error made others give up: they say so, and it says why.
        message = "; ".join(f"{_named(ranks)} of {self.size}, {what}: {text}" for text, ranks in told.items())
        if silent and least == _CONSEQUENCE:
            message += f" (no answer from {_named(silent)})"
        self._end(message)
        raise RankError(message) from next(error for error in errors.values() if _weight(error) == least)

    def _give_up(self, message: str) -> None:
        self._end(message)
        raise LateRankError(message)

    def _end(self, message: str) -> None:
        self._failed = message
        # What they wait for will not come, and on a GPU they wait at full power.
        for peer in self._peers.values():
            ray.kill(peer)


def _outcome(futures: Mapping[int, Future[Any]], limit_s: float) -> dict[int, BaseException]:
    """Errors by rank once all have ended, or once one has failed and the reason is known.

    Empty: no error within `limit_s` seconds; who has not ended by then is late.
    """
    wait_for(futures.values(), timeout=limit_s, return_when=FIRST_EXCEPTION)
    start = time.monotonic()
    while True:
        errors = {rank: error for rank, f in futures.items() if f.done() and (error := f.exception()) is not None}
        if not errors:
            return errors
        least = min(map(_weight, errors.values()))
        pending = [future for future in futures.values() if not future.done()]
        left = {_DEATH: 0.0, _OWN: _SETTLE_S, _CONSEQUENCE: _GRACE_S}[least] - (time.monotonic() - start)
        if left <= 0 or not pending:
            return errors
        wait_for(pending, timeout=left, return_when=FIRST_EXCEPTION)


def _weight(error: BaseException) -> int:
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        return _DEATH
    cause = _cause(error)
    # Gloo's errors have no type of their own; each names the line of its source.
    follows = isinstance(cause, DistError) or (isinstance(cause, RuntimeError) and "gloo" in str(cause))
    return _CONSEQUENCE if follows else _OWN


def _named(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error


def _described(error: BaseException) -> str:
    if isinstance(error, RayActorError):
        return told_death(error, "its")
    cause = _cause(error)
    return f"{type(cause).__name__}: {cause}"


class LedEngine:
    """See `tasks.engines.protocols.TrainerEngine`: rank 0's engine, and the same call on every other rank.

    Results are rank 0's. `save` and `load` name a folder that every rank reads or writes on its own machine.
    """

    def __init__(self, local: TrainerEngine, ranks: Ranks) -> None:
        self._local = local
        self._ranks = ranks

    @property
    def version(self) -> int:
        return self._local.version

    def export_weights(self, recipe: Recipe) -> SyncPayload:
        return self._all("export_weights", "sync_s", self._local.export_weights, recipe)

    def score(self, batch: RolloutBatch) -> Scores:
        return self._all("score", "score_s", self._local.score, batch)

    def train(self, batch: RolloutBatch, logprobs: Tensor, advantages: Tensor) -> dict[str, float]:
        return self._all("train", "train_s", self._local.train, batch, logprobs, advantages)

    def calibrate(self, rows: TokenRows) -> dict[str, float]:
        return self._all("calibrate", "calibrate_s", self._local.calibrate, rows)

    def report(self) -> EngineReport:
        return self._all("report", "sync_s", self._local.report)

    def offload(self) -> None:
        self._all("offload", "sleep_s", self._local.offload)

    def save(self, directory: Path) -> None:
        self._all("save", "checkpoint_s", self._local.save, directory)

    def load(self, directory: Path) -> None:
        self._all("load", "restore_s", self._local.load, directory)

    def _all(self, method: str, name: LimitName, local: Callable[..., T], *arguments: Any) -> T:
        # Once in the object store, however many ranks there are.
        shared = ray.put(arguments)
        result, peaks = self._ranks.call(
            method, name, lambda: local(*arguments), lambda _, peer: peer.follow.remote(method, shared)
        )
        self._ranks.peak_gb = max(self._ranks.peak_gb, *peaks.values())
        return result
