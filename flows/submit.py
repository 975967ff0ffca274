"""`fp8-grpo submit`: a run of a deployment, with the overrides of `fp8-grpo train`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import get_current_settings

from conf.problems import ConfigError
from flows.cancellation import SERVER_AWAY
from flows.exits import FAILED, OK, UNFINISHED, UNFINISHED_STATE
from flows.form import form_fields

_POLL_S = 1.0
_PATIENCE_S = 60.0


class SubmitError(RuntimeError):
    """The server did not answer, or did not take the run; the message names it."""


@dataclass(frozen=True)
class Submitted:
    """A flow run on the server: its id, the name Prefect gave it, and its page in the UI."""

    id: UUID
    name: str
    url: str


def submit(overrides: Sequence[str], deployment: str) -> Submitted:
    """Create a run of `deployment` (FLOW/NAME); `ConfigError` for one that is not there."""
    if deployment.count("/") != 1:
        raise ConfigError([f"deployment = {deployment}: not of the form FLOW/NAME; allowed: such as fp8-grpo/fp8-grpo"])
    api = str(get_current_settings().api.url)
    try:
        with get_client(sync_client=True) as client:
            found = _deployment(client, deployment, api)
            run = client.create_flow_run_from_deployment(found, parameters=form_fields(overrides))
    except PrefectHTTPStatusError as error:
        raise SubmitError(f"{api} refused the run: {error.response.text[:500]}") from error
    except SERVER_AWAY as error:
        raise SubmitError(f"{api}: {type(error).__name__}: {error}") from error
    return Submitted(run.id, run.name, f"{api.removesuffix('/api')}/runs/flow-run/{run.id}")


def _deployment(client: SyncPrefectClient, name: str, api: str) -> UUID:
    try:
        return client.read_deployment_by_name(name).id
    except ObjectNotFound as error:
        allowed = "one that `prefect deployment ls` shows (make deploy)"
        raise ConfigError([f"deployment = {name}: {api} does not have it; allowed: {allowed}"]) from error


def watch(run: Submitted) -> int:
    """Print each new state until the run ends; the exit code that says how.

    A server that is away is waited for, `SubmitError` after a minute. Ctrl-C ends the watching, not the run.
    """
    seen, heard = None, time.monotonic()
    while True:
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(run.id).state
            heard = time.monotonic()
        except SERVER_AWAY as error:
            if time.monotonic() - heard > _PATIENCE_S:
                raise SubmitError(f"flow run {run.name}: no answer for {_PATIENCE_S:.0f} s: {error}") from error
            state = None
        if state is not None and state.name != seen:
            seen = state.name
            message = f": {state.message}" if state.message else ""
            print(f"{seen}{message}", flush=True)
        if state is not None and state.is_final():
            if not state.is_completed():
                return FAILED
            return UNFINISHED if state.name == UNFINISHED_STATE else OK
        time.sleep(_POLL_S)
