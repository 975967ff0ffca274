"""Which of several failures is told, and how ranks meet."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch.distributed as dist
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from tasks.engines.protocols import EngineError
from tasks.ranks import RankError, Ranks, _outcome, _weight
from tasks.rendezvous import Meeting, arrive

GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
OWN = ValueError("a real one")


def _remote(cause: Exception) -> RayTaskError:
    return RayTaskError("train", "traceback", cause)


def test_a_death_explains_more_than_an_error_and_an_error_more_than_what_follows_from_it() -> None:
    assert [_weight(error) for error in (ActorDiedError(), OutOfMemoryError("x"))] == [0, 0]
    assert [_weight(error) for error in (OWN, _remote(OWN), EngineError("x"))] == [1, 1, 1]
    follows = (GLOO, _remote(GLOO), dist.DistBackendError("NCCL"), _remote(dist.DistStoreError("x")))
    assert [_weight(error) for error in follows] == [2, 2, 2, 2]


def _futures(*ends: BaseException | str | None) -> dict[int, Future[Any]]:
    """One for each rank: ended with an error, ended well (None), or pending (a word)."""
    made: dict[int, Future[Any]] = {rank: Future() for rank in range(len(ends))}
    for rank, end in enumerate(ends):
        if isinstance(end, BaseException):
            made[rank].set_exception(end)
        elif end is None:
            made[rank].set_result(rank)
    return made


def test_the_reason_is_waited_for_and_nothing_else_is() -> None:
    assert _outcome(_futures(None, None, None), 60.0) == {}
    # Rank 2 never answers; a death is known already.
    died = ActorDiedError()
    assert _outcome(_futures(GLOO, died, "pending"), 60.0) == {0: GLOO, 1: died}
    # Gloo's error on rank 0 came first, the reason later.
    late = _futures(GLOO, "pending", "pending")
    timer = threading.Timer(0.3, lambda: late[1].set_exception(died))
    timer.start()
    assert _outcome(late, 60.0) == {0: GLOO, 1: died}
    # An error of its own is told although the others hang.
    assert _outcome(_futures(OWN, "pending"), 60.0) == {0: OWN}


class _Ref:
    """As Ray's reference to the answer of a peer."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


def _failing(monkeypatch: pytest.MonkeyPatch, local: BaseException, *peers: BaseException | str | None) -> str:
    """What is said when rank 0 and its peers end so; all peers are ended, and no later call reaches one."""
    ended: list[str] = []
    monkeypatch.setattr("tasks.ranks.ray.kill", ended.append)
    names = [f"peer {rank}" for rank in range(1, 1 + len(peers))]
    ranks, futures = Ranks(names), _futures(None, *peers)  # type: ignore[arg-type]

    def fail() -> None:
        raise local

    with pytest.raises(RankError) as caught:
        ranks.call("train", "train_s", fail, lambda rank, peer: _Ref(futures[rank]))
    assert ended == names
    with pytest.raises(RankError, match=r"^score: the ranks of the trainer cannot go on: rank"):
        ranks.call("score", "score_s", fail, lambda rank, peer: pytest.fail("reached"))
    return str(caught.value)


def test_ranks_that_gave_up_together_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here rank 0 has the reason; where all say the same it is said once."""
    said = _failing(
        monkeypatch, OSError("disk full"), EngineError("rank 0 failed"), _remote(EngineError("rank 0 failed"))
    )
    assert said == "rank 0 of 3, train: OSError: disk full; rank 1, 2 of 3, train: EngineError: rank 0 failed"
    said = _failing(monkeypatch, OWN, OWN)
    assert said == "rank 0, 1 of 2, train: ValueError: a real one"


def test_a_rank_that_keeps_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that timed out does not say for whom it waited."""
    monkeypatch.setattr("tasks.ranks._GRACE_S", 0.2)
    said = _failing(monkeypatch, GLOO, None, "pending", _remote(GLOO))
    assert said == f"rank 0, 3 of 4, train: RuntimeError: {GLOO} (no answer from rank 2)"


def test_one_rank_runs_in_the_calling_thread() -> None:
    """And what it raises comes as it is."""
    ranks = Ranks()
    assert ranks.call("x", "train_s", threading.get_ident, lambda rank, peer: None) == (threading.get_ident(), {})

    def fail() -> None:
        raise OWN

    for _ in range(2):
        with pytest.raises(ValueError, match="a real one"):
            ranks.call("x", "train_s", fail, lambda rank, peer: None)


def test_the_port_of_a_meeting_is_held_and_ranks_that_came_are_known() -> None:
    meeting = Meeting("127.0.0.1", 4, timeout_s=0.5)
    port = int(meeting.url.rpartition(":")[2])
    with pytest.raises(OSError), socket.create_server(("127.0.0.1", port)):
        pass
    for rank in (1, 3):
        arrive(meeting.url, rank, timeout_s=5.0)
    with pytest.raises(EngineError, match=rf"rank 2 of 4 did not come to {meeting.url} within .* = 0.5"):
        meeting.wait()
    arrive(meeting.url, 2, timeout_s=5.0)
    meeting.wait()


def test_two_meetings_are_apart() -> None:
    first, second = (Meeting("127.0.0.1", 2, timeout_s=0.2) for _ in range(2))
    assert first.url != second.url
    arrive(first.url, 1, timeout_s=5.0)
    first.wait()
    with pytest.raises(EngineError, match="rank 1 of 2 did not come"):
        second.wait()


def test_a_meeting_where_nobody_is_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(EngineError, match=rf"rank 0 cannot be reached at tcp://127.0.0.1:{port}"):
        arrive(f"tcp://127.0.0.1:{port}", 1, timeout_s=1.0)
