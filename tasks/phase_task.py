"""Prefect tasks of a step, whose arguments Prefect passes on unread."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import quote

P = ParamSpec("P")
R = TypeVar("R")


class PhaseTask(Generic[P, R]):
    """A function that is a Prefect task when it is called; `fn` is the function alone.

    Prefect looks for states and futures in all that a task is given, element by element: 0.7 s for the token ids of 128
    prompts of 500 tokens. Here there are none, and `quote` says so.
    """

    def __init__(self, fn: Callable[P, R], name: str) -> None:
        update_wrapper(self, fn)
        self.fn, self.name = fn, name
        # Engines have state: a cached result of an earlier call would silently stand for work not done.
        self._task: Callable[..., Any] = task(
            fn, name=name, cache_policy=NO_CACHE, persist_result=False, log_prints=False
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        quoted = {name: quote(value) for name, value in kwargs.items()}
        result: R = self._task(*(quote(value) for value in args), **quoted)
        return result


def phase_task(name: str) -> Callable[[Callable[P, R]], PhaseTask[P, R]]:
    """Decorator of a function that drives an engine: a task of that name in Prefect, never cached and never stored."""
    return lambda fn: PhaseTask(fn, name)
