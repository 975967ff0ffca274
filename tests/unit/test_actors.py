"""What the trainer's actor still holds when it gives its device to the rollout engine."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.compose import compose
from conf.schema import Deadlines
from tasks import actors
from tasks.actors import TrainerActor
from tasks.engines.protocols import SyncPayload
from tasks.engines.transport import Sent
from tasks.ranks import LedEngine, Ranks


class _Engine:
    """Exports one tensor, and looks at `offload` whether anybody still holds it."""

    def __init__(self) -> None:
        self.exported: weakref.ref[Tensor] | None = None
        self.held_at_offload: bool | None = None

    def export_weights(self, recipe: Any) -> SyncPayload:
        tensor = torch.ones(4)
        self.exported = weakref.ref(tensor)
        return SyncPayload(3, {"w": tensor}, {(0, "k"): 0.5}, {"w": 7})

    def offload(self) -> None:
        assert self.exported is not None
        self.held_at_offload = self.exported() is not None


@pytest.mark.parametrize("led", [False, True])
def test_nobody_holds_what_was_sent_when_the_device_is_given_back(led: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "send", lambda payload, link, limit: Sent("host", 16, len(payload.tensors)))
    engine, actor, rollout = _Engine(), TrainerActor(), object()
    # Of two ranks the leader's results pass through a thread of its own and its futures.
    ranks = Ranks([_Peer()] if led else [])  # type: ignore[list-item]
    monkeypatch.setattr("tasks.ranks.ray.put", lambda arguments: arguments)
    actor._built = LedEngine(engine, ranks) if led else engine  # type: ignore[arg-type, assignment]
    sent = actor.send_weights(compose().recipe, rollout, 1, Deadlines())  # type: ignore[arg-type]
    ranks.close()
    assert engine.held_at_offload is False
    assert (sent["version"], sent["scales"], sent["fingerprints"]) == (3, {(0, "k"): 0.5}, {"w": 7})
    assert sent["metrics"]["sync/gb"] == 16 / 1e9


class _Peer:
    """As Ray's handle of a rank that has done its part at once."""

    @property
    def follow(self) -> _Peer:
        return self

    def remote(self, method: str, shared: Any) -> _Peer:
        return self

    def future(self) -> Future[float]:
        done: Future[float] = Future()
        done.set_result(0.5)
        return done
