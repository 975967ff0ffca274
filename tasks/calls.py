"""Calls from tasks to the engines' actors: phases are timed, and failures come back typed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from prefect.cache_policies import NO_CACHE
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from tasks.engines.protocols import EngineError

TASK_OPTIONS: dict[str, Any] = {
    # Engines have state: a cached result of an earlier call would silently stand for work not done.
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "log_prints": False,
}
"""Options of every Prefect task that drives an engine."""


class PhaseError(EngineError):
    """A phase of a step failed; the message names the phase and the engine."""


@dataclass
class Stopwatch:
    """Wall seconds of a phase, set when it ends."""

    seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Measure the wall time of a block."""
    watch, start = Stopwatch(), time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - start


class Engines:
    """The actors of one run. A plain class on purpose: Prefect walks through dataclasses it is handed.

    `followers`: the trainer's ranks but the first, which `trainer` leads; nobody else calls them.
    """

    def __init__(
        self,
        rollout: ActorHandle,
        trainer: ActorHandle,
        successor: Callable[[ActorHandle], ActorHandle] | None = None,
        followers: Sequence[ActorHandle] = (),
    ) -> None:
        self.rollout = rollout
        self.trainer = trainer
        self.followers = tuple(followers)
        self._successor = successor

    def replace_rollout(self) -> None:
        """End the rollout engine's process and start another; without a way to start one it stays."""
        if self._successor is not None:
            self.rollout = self._successor(self.rollout)


def wait(phase: str, ref: Any, timeout_s: float | None = None) -> Any:
    """The value of an actor call; any failure is a `PhaseError` that names the phase, lateness included."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise PhaseError(f"{phase}: no answer within {timeout_s:g} s") from error
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        raise PhaseError(f"{phase}: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise PhaseError(f"{phase}: the engine's process died: {error}") from error
    except RayError as error:
        # A lost object, a full store, a worker that ran out of memory.
        raise PhaseError(f"{phase}: {type(error).__name__}: {error}") from error
