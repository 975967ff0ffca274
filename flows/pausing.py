"""A flow run that waits for a person, with its engines as they are: Paused in Prefect until somebody resumes it."""

from __future__ import annotations

import time
from typing import Final
from uuid import UUID, uuid4

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import ObjectNotFound
from prefect.states import Paused

from flows.cancellation import SERVER_AWAY

_POLL_S: Final = 5.0


class PauseError(RuntimeError):
    """Prefect does not pause this run; the message says why."""


def await_person(flow_run_id: str, timeout_s: float, message: str) -> bool:
    """Pause the run, and wait until it is resumed; False when nobody did within `timeout_s`.

    A server that is away meanwhile is waited for as well. `KeyboardInterrupt` where somebody set the run to Cancelled
    (Prefect takes no Cancelling of a run that is paused), `PauseError` for any other end that it was given.
    """
    end = time.monotonic() + timeout_s
    paused = Paused(timeout_seconds=max(1, round(timeout_s)), reschedule=False, pause_key=uuid4().hex)
    paused.message = message
    while True:
        try:
            with get_client(sync_client=True) as client:
                answer = client.set_flow_run_state(UUID(flow_run_id), paused)
            break
        except SERVER_AWAY as error:
            if time.monotonic() >= end:
                raise PauseError(f"the run could not be paused: {error}") from error
            _rest(end)
    if answer.status != SetStateStatus.ACCEPT:
        raise PauseError(f"the run could not be paused: {getattr(answer.details, 'reason', answer.status)}")
    while time.monotonic() < end:
        _rest(end)
        state = _state_of(UUID(flow_run_id))
        if state is not None and state.is_running():
            return True
        if state is not None and state.is_cancelled():
            raise KeyboardInterrupt
        if state is not None and state.is_final():
            raise PauseError(f"the paused run was set to {state.name}")
    return False


def _rest(end: float) -> None:
    """Until the next look, or the end if that comes before."""
    time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))


def _state_of(flow_run_id: UUID) -> State | None:
    try:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(flow_run_id).state
    except (ObjectNotFound, *SERVER_AWAY):
        return None
