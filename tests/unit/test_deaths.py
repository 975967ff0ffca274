"""Whose process died, in the first line of a failure."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError

from infra.run_actors import actor_prefix, role_of
from tasks.calls import PhaseError, wait
from tasks.deadlines import Clock, Limit
from tasks.deaths import told

PREFIX = actor_prefix("01234567-89ab-cdef-0123-456789abcdef", 2)
CAUSE = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"


def _died(name: str) -> ActorDiedError:
    """With a text as Ray makes it."""
    error = ActorDiedError()
    fields = ("class_name: TrainerActor", "actor_id: ab12", "pid: 77", f"name: {name}", "namespace: x", "ip: 10.0.0.1")
    error.error_msg = "\n".join((ActorDiedError.BASE_ERROR_MSG, *(f"\t{field}" for field in fields), CAUSE))
    return error


@pytest.mark.parametrize(
    ("end", "role"),
    [
        ("trainer-rank-0", "trainer rank 0"),
        ("trainer-rank-12", "trainer rank 12"),
        ("trainer", "the trainer"),
        ("rollout-3", "the rollout engine"),
    ],
)
def test_an_actors_name_says_what_it_is(end: str, role: str) -> None:
    assert role_of(f"{PREFIX}-{end}") == role
    assert told(_died(f"{PREFIX}-{end}")) == f"{role}'s process died (pid 77 on 10.0.0.1): {CAUSE}"


def test_names_of_others() -> None:
    assert [role_of(name) for name in ("", PREFIX, "grader", f"{PREFIX}-trainer-x")] == [None] * 4
    assert told(_died("grader")).startswith("the engine's process died (pid 77")
    assert told(_died("grader"), "its").startswith("its process died (pid 77")


def test_texts_without_fields_stay_whole() -> None:
    assert told(ActorDiedError()) == f"the engine's process died: {ActorDiedError.BASE_ERROR_MSG}"
    assert told(RayActorError(error_msg="a\n  traceback")) == "the engine's process died: a\n  traceback"
    lost = ActorUnavailableError("gone for now", None)
    assert told(lost, "its").startswith("its process cannot be reached: ")


@pytest.mark.parametrize("behind", [False, True], ids=["called", "called by the one that was called"])
def test_a_phase_names_the_rank(monkeypatch: pytest.MonkeyPatch, behind: bool) -> None:
    died: Any = _died(f"{PREFIX}-trainer-rank-0")
    error = RayTaskError("send_weights", "traceback", died) if behind else died

    def get(ref: object, timeout: float | None) -> None:
        raise error

    monkeypatch.setattr("tasks.calls.ray.get", get)
    with pytest.raises(PhaseError) as caught:
        wait("sync (transfer)", None, Clock(Limit("deadlines.sync_s", 1.0)))
    assert str(caught.value) == (f"sync (transfer): trainer rank 0's process died (pid 77 on 10.0.0.1): {CAUSE}")
