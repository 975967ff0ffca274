"""Wall time that a call may take: a run stops after a finished step, a sweep begins no run that could do nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from infra.journal import Entry, Journal

_REPORT_SHARE: Final = 0.1
_REPORT_S: Final = 30.0
"""A sweep keeps this share of its allocation for its report, and no more than so many seconds."""

_LATEST: Final = 5
"""So many of the last measurements of a part count."""

_TIMES: Final = {"step": "time/step_s", "eval": "time/eval_s", "checkpoint": "time/checkpoint_s"}
"""Where the journal says what a part of a run took."""


def process_age_s() -> float:
    """Seconds since this process began: where a command is one process, what its start has used of an allocation."""
    return max(0.0, time.time() - psutil.Process().create_time())


class RunStopped(Exception):
    """The allocation of a run is used up; `step` is its last checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


class Pace:
    """What the parts of a run took lately, and whether others fit into what is left of its allocation (seconds).

    The longest of the last few counts: the very first of a process may be many times as long.
    """

    def __init__(self, seconds: float | None, used: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds - used
        self._latest: dict[str, deque[float]] = {}

    def learn(self, entries: tuple[Entry, ...]) -> None:
        """From the journal of a run that is continued."""
        for entry in entries:
            value = entry.values.get(_TIMES.get(entry.kind, ""))
            if isinstance(value, float):
                self.note(entry.kind, value)

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """Around a part of the run."""
        began = self._clock()
        yield
        self.note(part, self._clock() - began)

    def note(self, part: str, seconds: float) -> None:
        self._latest.setdefault(part, deque(maxlen=_LATEST)).append(seconds)

    def left(self) -> float:
        """Seconds to the end of the allocation, less what a checkpoint takes; infinite without one, never below 0."""
        return max(0.0, self._end - self._clock() - self._longest("checkpoint"))

    def allows(self, *parts: str) -> bool:
        """Whether they fit, should each take as long as it did; a part that was never measured takes nothing."""
        return self._clock() + sum(map(self._longest, parts)) < self._end

    def _longest(self, part: str) -> float:
        return max(self._latest.get(part, (0.0,)))


class Allocation:
    """The wall time of one call of a sweep, and what is left of it for runs (seconds; infinite without a limit).

    The last tenth, half a minute at most, is for the report. Half as much lies between the time by which a run is to
    have stopped itself and that at which it is ended.
    """

    def __init__(self, seconds: float | None, used: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds - used
        self._reserve = 0.0 if seconds is None else min(_REPORT_S, _REPORT_SHARE * seconds)
        self._useful = 0.0
        self._begun = False

    @property
    def for_a_run(self) -> float:
        """What a run that begins now is told to take at most."""
        return self._end - 1.5 * self._reserve - self._clock()

    @property
    def until_ended(self) -> float:
        """When a run that does not stop is ended."""
        return max(0.0, self._end - self._reserve - self._clock())

    def begins(self) -> bool:
        """Whether another run is begun: the first one, and then each that has time for as much as a first step."""
        if self.for_a_run <= 0 or (self._begun and self.for_a_run < self._useful):
            return False
        self._begun = True
        return True

    def learn(self, journal: Path, began_s: float) -> None:
        """From the journal of a run that was begun at `began_s` (epoch): the time to its first finished step here."""
        first = first_step_s(journal, began_s)
        if first is not None:
            self._useful = max(self._useful, first)


def first_step_s(journal: Path, began_s: float) -> float | None:
    """Seconds from `began_s` (epoch) to the first step that the journal has of a later time; None without one."""
    if not journal.is_file():
        return None
    with Journal(journal) as read:
        times = [entry.time_ms / 1000 for entry in read.entries() if entry.kind == "step"]
    return next((moment - began_s for moment in times if moment >= began_s), None)
