"""Scores for completions, with a time limit per answer that works from any thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tasks.data.child import Child, ChildDied, ChildTimeout
from tasks.data.examples import Example, GraderSpec
from tasks.data.wire import WireError, encode

WORKER_MODULE = "tasks.data.grader_worker"
STARTUP_LIMIT_S = 120.0


class GraderError(Exception):
    """The verifier cannot be run at all: it does not start, or the grader is closed."""


@dataclass(frozen=True)
class Grade:
    """What one completion earned.

    `score` in [0, 1]; `solved`: score >= 1. `timed_out`: the verifier passed the limit (score 0).
    `error`: why there is no verdict (the verifier raised, died or returned no score; score 0), else None.
    """

    score: float
    solved: bool
    timed_out: bool = False
    error: str | None = None


class Grader:
    """Runs one verifier in a child process, one answer at a time.

    The child starts with the object and imports its library while the caller goes on. An answer that passes
    the limit costs the child its life and scores 0; the next answer gets a new one. `grade` may be called
    from any thread; calls take turns. Closing ends the child; it also ends by itself when this process is
    gone: at once when idle, at the latest five seconds past the limit when busy.

    `time_limit_s`: seconds of wall time per answer, > 0. Start-up of the verifier does not count.
    """

    def __init__(self, spec: GraderSpec, time_limit_s: float) -> None:
        if not time_limit_s > 0:
            raise GraderError(f"answer_time_limit_s={time_limit_s!r}; allowed: a number > 0 (seconds)")
        self._spec = spec
        self._time_limit_s = time_limit_s
        try:
            self._hello = _hello(spec, time_limit_s)
        except WireError as error:
            raise GraderError(f"grader {error}") from error
        self._lock = threading.Lock()
        self._closed = False
        self._ready = False
        self._child: Child | None = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def grade(self, items: Sequence[tuple[Example, str]]) -> list[Grade]:
        """One grade per (example, completion), in order. The completion is stripped before it is graded.

        Raises GraderError when the verifier does not start (import error, start-up over two minutes) or the
        grader is closed; anything that happens on a single answer is in its Grade.
        """
        with self._lock:
            return [self._grade_one(example, completion) for example, completion in items]

    def close(self) -> None:
        """End the child. An answer that is being graded is finished first; later calls raise GraderError."""
        self._closed = True
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                # One that is still importing would not see the end of its stdin for seconds.
                if self._ready:
                    child.close()
                else:
                    child.kill()

    def _grade_one(self, example: Example, completion: str) -> Grade:
        try:
            request = {"completion": completion.strip(), "entry": encode(_entry(example), "entry")}
        except WireError as error:
            return _ungraded(f"example {example.id} cannot be sent to its verifier: {error}")
        child = self._running_child()
        answered = False
        try:
            deadline = time.monotonic() + self._time_limit_s
            child.send(request, deadline)
            reply = child.receive(deadline)
            answered = True
        except ChildTimeout:
            return Grade(score=0.0, solved=False, timed_out=True)
        except ChildDied as death:
            return _ungraded(f"the verifier's process {death}")
        finally:
            # Also on an interrupt: a reply still under way would be taken for the next answer's.
            if not answered:
                self._child = None
                child.kill()
        return self._verdict(reply)

    def _verdict(self, reply: dict[str, Any]) -> Grade:
        if "error" in reply:
            return _ungraded(str(reply["error"]))
        score = float(reply["score"])
        if not self._spec.partial_credit:
            score = 1.0 if score >= 1.0 else 0.0
        return Grade(score=score, solved=score >= 1.0)

    def _running_child(self) -> Child:
        """A child that has said it is ready. Raises GraderError."""
        if self._closed:
            raise GraderError("the grader is closed")
        child = self._child
        if child is None:
            child = self._child = self._start()
        if not self._ready:
            self._await_ready(child)
        return child

    def _start(self) -> Child:
        self._ready = False
        child = Child(WORKER_MODULE)
        # A new pipe takes this without waiting, so that the import starts now. If the child is dead already,
        # _await_ready finds out.
        with contextlib.suppress(ChildDied, ChildTimeout):
            child.send(self._hello, time.monotonic() + STARTUP_LIMIT_S)
        return child

    def _await_ready(self, child: Child) -> None:
        name = f"{self._spec.kind} {self._spec.target}".strip()
        problem = "its process did not get as far as an answer"
        try:
            reply = child.receive(time.monotonic() + STARTUP_LIMIT_S)
            self._ready = reply.get("ready") is True
            problem = str(reply.get("error", problem))
        except ChildTimeout:
            problem = f"not ready after {STARTUP_LIMIT_S:g} s"
        except ChildDied as death:
            problem = f"its process {death}"
        finally:
            if not self._ready:
                self._child = None
                child.kill()
        if not self._ready:
            raise GraderError(f"verifier {name} does not start: {problem}")


def _hello(spec: GraderSpec, time_limit_s: float) -> dict[str, Any]:
    return {
        "kind": spec.kind,
        "target": spec.target,
        "parameters": encode(dict(spec.parameters), "parameters"),
        "memory_limit_mb": spec.memory_limit_mb,
        "time_limit_s": time_limit_s,
    }


def _entry(example: Example) -> dict[str, Any]:
    return {
        "question": example.prompt,
        "answer": example.answer if example.has_answer else None,
        "metadata": dict(example.metadata),
    }


def _ungraded(error: str) -> Grade:
    return Grade(score=0.0, solved=False, error=error)
