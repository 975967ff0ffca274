"""The process that runs a verifier: `python -m tasks.data.grader_worker`, started by `tasks.data.grading`.

One message says which verifier; the answer is {"ready": true} or {"error": ...}. After that each request
{"completion", "entry"} gets {"score"} or {"error"}, until stdin ends.
"""

from __future__ import annotations

import importlib
import math
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from tasks.data.wire import Wire, claim_pipes, decode

Verifier = Callable[[str, dict[str, Any]], float]

_ORPHAN_GRACE_S = 5.0


class VerifierError(Exception):
    """A verifier that cannot be built, or a verdict that is no score."""


def load_verifier(kind: str, target: str, parameters: dict[str, Any]) -> Verifier:
    """The function (completion, entry) -> score in [0, 1] that a GraderSpec describes."""
    if kind == "reasoning_gym":
        return _reasoning_gym(target, parameters)
    if kind == "math_verify":
        from tasks.data.math_answers import math_score, warm_up

        warm_up()
        return math_score
    return _callable(target)


def _reasoning_gym(task: str, parameters: dict[str, Any]) -> Verifier:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, **parameters, seed=0, size=1)
    score_answer: Verifier = dataset.score_answer
    return score_answer


def _callable(target: str) -> Verifier:
    module, _, name = target.partition(":")
    function: Verifier | None = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise VerifierError(f"{target}: the module has no function of that name")
    return function


def check_score(value: Any) -> float:
    """`value` as a float in [0, 1]. Raises VerifierError for anything else, NaN included."""
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not 0.0 <= score <= 1.0:
        raise VerifierError(f"the verifier returned {value!r:.80}; allowed: a number from 0 to 1")
    return score


def serve(wire: Wire) -> None:
    """Answer until the driver closes the pipe or is gone."""
    hello = wire.receive()
    if hello is None:
        return
    try:
        verifier = load_verifier(hello["kind"], hello["target"], decode(hello["parameters"]))
        _limit_memory(hello["memory_limit_mb"])
    except Exception as error:
        wire.send({"error": _described(error)})
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    wire.send({"ready": True})
    while (request := wire.receive()) is not None:
        # The kernel ends a busy process whose driver is gone, even in a computation that never returns to
        # the interpreter.
        signal.setitimer(signal.ITIMER_REAL, hello["time_limit_s"] + _ORPHAN_GRACE_S)
        try:
            verdict = verifier(request["completion"], decode(request["entry"]))
            reply: dict[str, Any] = {"score": check_score(verdict)}
        except Exception as error:
            reply = {"error": _described(error)}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        wire.send(reply)


def _limit_memory(megabytes: int | None) -> None:
    # Other systems do not enforce the limit or refuse to set it.
    if megabytes is not None and sys.platform == "linux":
        limit = megabytes << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


if __name__ == "__main__":
    serve(claim_pipes())
