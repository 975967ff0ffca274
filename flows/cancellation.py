"""Cancelling a run that no worker started (`fp8-grpo train`, `sweep`), where Prefect has no process to end."""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final
from uuid import UUID

import httpx
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Running, State

_POLL_S: Final = 10.0
SERVER_AWAY: Final = (httpx.HTTPError, RuntimeError)
"""What a Prefect server that does not answer raises: Prefect has no type of its own for that."""


class Cancellation:
    """Whether a run that goes on is to be cancelled. A run of a deployment is left to its worker."""

    def __init__(self, flow_run: FlowRun) -> None:
        self._id = flow_run.id
        self._ours = flow_run.deployment_id is None and threading.current_thread() is threading.main_thread()
        # Reentrant: the interrupt may come while this thread holds it.
        self._lock = threading.RLock()
        self._heeding = False
        self._asked = False

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Within the block a cancel interrupts this process as Ctrl-C does; after it, it comes too late."""
        if not self._ours:
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:
            # As a shell starts what it puts into the background: its Ctrl-C stays ignored.
            signal.signal(signal.SIGINT, self._interrupt)
        ended = threading.Event()
        self._heeding = True
        # The server that this context has, which is not always the process's.
        watch = contextvars.copy_context()
        threading.Thread(target=watch.run, args=(self._watch, ended), name="cancellation", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._heeding = False
            ended.set()
            if before is signal.SIG_IGN:
                signal.signal(signal.SIGINT, before)

    def withdraw(self) -> None:
        """A run that ends by itself is not Cancelled, though it was asked to be: Prefect would take no other state."""
        if not self._ours or self._asked:
            return
        try:
            with get_client(sync_client=True) as client:
                if _is_cancelling(client, self._id):
                    client.set_flow_run_state(self._id, Running(message="too late to be cancelled"), force=True)
        except (ObjectNotFound, *SERVER_AWAY):
            # Prefect says so itself when it stores the end; here it would stand before the run's own error.
            return

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt

    def _watch(self, ended: threading.Event) -> None:
        # Again and again: an interrupt can be lost in code that swallows it.
        while not ended.wait(_POLL_S):
            try:
                with get_client(sync_client=True) as client:
                    cancelling = _is_cancelling(client, self._id)
            except ObjectNotFound:
                return
            except SERVER_AWAY:
                continue
            if cancelling:
                with self._lock:
                    if self._heeding:
                        self._asked = True
                        os.kill(os.getpid(), signal.SIGINT)


def _is_cancelling(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    state = client.read_flow_run(flow_run_id).state
    return state is not None and state.type == StateType.CANCELLING


@contextmanager
def cancellable(flow_run: FlowRun) -> Iterator[Cancellation]:
    """Around all that a flow run does: what ends by itself keeps its own state. See `Cancellation.heeded`."""
    cancellation = Cancellation(flow_run)
    try:
        yield cancellation
    finally:
        cancellation.withdraw()


def settle_cancelled(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A hook: what was being cancelled when it ended is Cancelled; Prefect calls an interrupted run Crashed."""
    with get_client(sync_client=True) as client:
        *_, last = [past.type for past in client.read_flow_run_states(flow_run.id) if past.type != StateType.CRASHED]
        if last == StateType.CANCELLED or (last == StateType.CANCELLING and flow_run.deployment_id is None):
            # A worker does that for those that were being cancelled; a paused run can be set to Cancelled at once.
            client.set_flow_run_state(flow_run.id, Cancelled(message="its process ended itself"), force=True)
