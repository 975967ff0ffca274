"""The far end of a sync as a Ray actor, for the process of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from tasks.engines.protocols import SyncError, SyncHeader
from tasks.engines.transport import Chunk


class RolloutLink:
    """See `tasks.engines.transport.Receiver`. Each call is answered within `timeout_s` seconds or is a `SyncError`."""

    def __init__(self, rollout: ActorHandle, timeout_s: float) -> None:
        self._rollout = rollout
        self._timeout_s = timeout_s
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
            return ray.get(ref, timeout=self._timeout_s)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise SyncError(f"{stage}: {cause}") from error
        except RayActorError as error:
            raise SyncError(f"{stage}: the rollout engine's process died: {error}") from error
        except GetTimeoutError as error:
            limit = f"cluster.sync_timeout_s = {self._timeout_s:g}"
            raise SyncError(f"{stage}: the rollout engine did not answer within {limit}") from error
        except RayError as error:
            raise SyncError(f"{stage}: {type(error).__name__}: {error}") from error
