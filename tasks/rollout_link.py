"""The far end of a sync as a Ray actor, for the process of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from tasks.deadlines import LateAnswer, Limit
from tasks.deaths import told
from tasks.engines.protocols import SyncError, SyncHeader
from tasks.engines.transport import Chunk


class LateSyncError(SyncError, LateAnswer):
    """The rollout engine did not answer in time."""


class RolloutLink:
    """See `tasks.engines.transport.Receiver`. Each call is answered within `limit` or is a `SyncError`."""

    def __init__(self, rollout: ActorHandle, limit: Limit) -> None:
        self._rollout = rollout
        self._limit = limit
        self._chunks = 0

    def begin(self, header: SyncHeader) -> str | None:
        place: str | None = self._answer("announcing the weights", self._rollout.begin_sync.remote(header))
        return place

    def receive(self, chunk: Chunk) -> Callable[[], None]:
        self._chunks += 1
        stage, ref = f"installing chunk {self._chunks}", self._rollout.receive.remote(chunk)
        return lambda: self._answer(stage, ref)

    def finish(self) -> None:
        self._answer("finishing", self._rollout.finish_sync.remote())

    def _answer(self, stage: str, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=self._limit.seconds)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise SyncError(f"{stage}: {cause}") from error
        except RayActorError as error:
            death = told(error, "the rollout engine's")
            raise SyncError(f"{stage}: {death}") from error
        except GetTimeoutError as error:
            raise LateSyncError(f"{stage}: the rollout engine: {self._limit.missed()}") from error
        except RayError as error:
            raise SyncError(f"{stage}: {type(error).__name__}: {error}") from error
