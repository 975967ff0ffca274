"""Rollout engines that are kept: who needs one of the same kind again syncs it and does not build it."""

from __future__ import annotations

from collections.abc import Callable

import ray
from ray.actor import ActorHandle


class RolloutPool:
    """At most `most` processes of rollout engines, each with the kind of engine that it was built for.

    Runs use it one after another. A lone run has a pool of one, whose engine makes room for the next kind.
    """

    def __init__(self, most: int = 1, end: Callable[[ActorHandle], None] = ray.kill) -> None:
        self.most = most
        self._end = end
        # By kind, the one that was used longest ago first.
        self._kept: dict[str, ActorHandle] = {}
        self._ahead: ActorHandle | None = None
        self._touched: set[str] = set()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the engines that are kept, the one that was used longest ago first."""
        return tuple(self._kept)

    def begin(self, spawn: Callable[[], ActorHandle]) -> ActorHandle | None:
        """A run begins. Where nothing is kept, starts a process ahead of its first engine and returns it."""
        self._touched = set()
        if not self._kept and self._ahead is None:
            self._ahead = spawn()
        return self._ahead

    def take(self, kind: str, start: Callable[[], ActorHandle], in_place: bool) -> tuple[ActorHandle, bool]:
        """A process for an engine of `kind`, and whether it holds one. Without, the caller builds it there.

        `start` gives a process that is ready. `in_place`: whether an engine can be replaced within its process.
        """
        self._touched.add(kind)
        if kind in self._kept:
            self._kept[kind] = self._kept.pop(kind)
            return self._kept[kind], True
        handle, self._ahead = self._ahead, None
        while len(self._kept) >= self.most:
            oldest = self._kept.pop(next(iter(self._kept)))
            if in_place and handle is None:
                handle = oldest
            else:
                self._end(oldest)
        self._kept[kind] = start() if handle is None else handle
        return self._kept[kind], False

    def throw_away(self) -> None:
        """End the engines that the run has used: it failed, and nobody knows what they hold."""
        if self._ahead is not None:
            self._end(self._ahead)
            self._ahead = None
        for kind in self._touched & self._kept.keys():
            self._end(self._kept.pop(kind))
