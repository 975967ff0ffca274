"""State hooks: whatever way a run ends, its actors and processes end with it.

Each may run more than once, and in another process than the flow's: Prefect's worker calls them for a process that was
killed, and after a cancelled run went through Crashed. Their parameters must have these names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelling, State

from conf.compose import compose
from conf.overrides import override_key
from conf.problems import ConfigError
from conf.schema import RunConfig
from flows.cancellation import settle_cancelled
from flows.environment import prepare_environment, tracking_uri
from infra.run_actors import FreeingError, kill_actors, kill_processes


def free_actors(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """End the actors and processes of a flow run; what is gone already is no error."""
    logger = flow_run_logger(flow_run, flow)
    run = str(flow_run.id)
    ended = kill_processes(run)
    names: list[str] = []
    address = cluster_address(flow_run.parameters)
    if address is not None:
        prepare_environment(local_ray=False)
        try:
            names = kill_actors(address, [run])
        except FreeingError as error:
            logger.error("the actors of this run could not be freed: %s; the janitor tries again", error)
    if names or ended:
        logger.info("freed: %s", ", ".join([*names, *(f"process {pid}" for pid in ended)]))


def cluster_address(parameters: Mapping[str, Any]) -> str | None:
    """The existing Ray cluster that a flow run with these parameters uses; None for a Ray of its own, or none."""
    config = configured(parameters, ("cluster",))
    if config is None:
        return None
    if config.cluster.kind != "existing" or config.cluster.address != "auto":
        return config.cluster.address
    return os.environ.get("RAY_ADDRESS", "auto")


def tracking_place(parameters: Mapping[str, Any]) -> tuple[str, str] | None:
    """URI and experiment of the MLflow store of a flow run with these parameters; None for what is refused."""
    config = configured(parameters, ("tracking", "runs_dir"))
    if config is None:
        return None
    return tracking_uri(config.tracking.uri, Path(config.runs_dir)), config.tracking.experiment


def configured(parameters: Mapping[str, Any], keys: Collection[str]) -> RunConfig | None:
    """These keys of a flow run with these parameters, and what lies below them, the rest as shipped.

    No other key is read, nor tags: it may lean on what this process lacks. None for what is refused.
    """
    overrides = parameters.get("overrides") or ()
    if not isinstance(overrides, Sequence) or isinstance(overrides, str):
        return None
    try:
        return compose([text for text in map(str, overrides) if _is_below(override_key(text), keys)])
    except ConfigError:
        # It never started anything.
        return None


def _is_below(key: str, keys: Collection[str]) -> bool:
    return not key.startswith("tracking.tags") and any(f"{key}.".startswith(f"{wanted}.") for wanted in keys)


def end_submitted(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the runs of deployments that a flow run submitted and that have not ended: nobody waits for them."""
    with get_client(sync_client=True) as client:
        names = cancel_submitted(client, flow_run)
    if names:
        flow_run_logger(flow_run, flow).info("cancelled: %s", ", ".join(names))


def cancel_submitted(client: SyncPrefectClient, parent: FlowRun) -> list[str]:
    """See `end_submitted`; returns the names of what is being cancelled."""
    going = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
    wanted = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent.id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=going)),
    )
    names: dict[UUID, str] = {}
    # A page at a time: what is being cancelled is no longer found, unless the server refuses.
    while found := [run for run in client.read_flow_runs(flow_run_filter=wanted) if run.id not in names]:
        for run in found:
            client.set_flow_run_state(run.id, Cancelling(message=f"flow run {parent.name} ended"))
            names[run.id] = run.name
    return list(names.values())


FREEING: Final[dict[str, Any]] = {
    "on_failure": [free_actors],
    "on_crashed": [free_actors, settle_cancelled],
    "on_cancellation": [free_actors, settle_cancelled],
}
"""Hooks of every flow that starts actors or processes; `settle_cancelled` comes last, as the run has ended then."""

ENDING: Final[dict[str, Any]] = {moment: [end_submitted, *hooks] for moment, hooks in FREEING.items()}
"""Hooks of a flow that submits runs of deployments besides."""
