"""Deadlines of phases: the key that sets one, and the clock that runs against it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from conf.schema import Deadlines
from tasks.engines.protocols import EngineError

LimitName = Literal[
    "warm_start_s",
    "build_s",
    "restore_s",
    "sync_s",
    "generate_s",
    "score_s",
    "train_s",
    "calibrate_s",
    "evaluate_s",
    "preflight_s",
    "checkpoint_s",
    "sleep_s",
]
"""Keys of `Deadlines`."""


class LateAnswer(EngineError):
    """An engine did not answer another within its deadline."""


@dataclass(frozen=True)
class Limit:
    """Longest wait, in seconds, and the key of the configuration that sets it."""

    key: str
    seconds: float

    def missed(self, times: int = 1) -> str:
        """What to say of whoever is later than `times` that."""
        within = f"{self.key} = {self.seconds:g} s" if times == 1 else f"{times} x {self.key} = {self.seconds:g} s"
        return f"no answer within {within}; allowed: a larger {self.key}, if it is only slow"


def limit_of(deadlines: Deadlines, name: LimitName) -> Limit:
    """The limit that the key `name` sets."""
    return Limit(f"deadlines.{name}", getattr(deadlines, name))


class Clock:
    """Runs from its making.

    `times`: how often the limit may pass, and `grace` seconds more, before it is up.
    """

    def __init__(self, limit: Limit, times: int = 1, grace: float = 0.0) -> None:
        self._limit, self._times = limit, times
        self._end = time.monotonic() + times * limit.seconds + grace

    def left(self) -> float:
        """Seconds, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def missed(self) -> str:
        """What to say of whoever is later."""
        return self._limit.missed(self._times)
