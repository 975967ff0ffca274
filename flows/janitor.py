"""The flow `janitor`: ends what dead runs left behind.

A run whose process and worker were killed at once reports nothing: it stays Running, holds its concurrency slot and its
actors. Its heartbeats stop; this flow, which the automation of `janitor/hourly` starts then, and the clock besides,
does what its hooks could not.
"""

# Annotations are evaluated here and now: Prefect runs a served flow where their names would not be found.
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed
from pydantic import Field

from conf.compose import compose
from flows.console import Console
from flows.environment import prepare_environment
from flows.form import Override
from flows.hooks import cancel_submitted, cluster_address, tracking_place
from infra.mlflow_run import finish_abandoned
from infra.run_actors import FreeingError, actors_of, kill_actors, kill_processes
from infra.store import CheckpointStore, StoreError
from infra.store_files import absolute_url

FLOWS: Final = ("fp8-grpo", "precision-sweep", "evaluate", "rollout-benchmark")
"""Flows whose runs are looked after."""
_HEARTBEAT: Final = "prefect.flow-run.heartbeat"
_PAGE: Final = 200
_UNFINISHED_S: Final = 3600.0
"""An attempt at a checkpoint in which nothing was written for so long is not being written."""


@dataclass
class Findings:
    """What a pass did. `marked`: runs by id and new state; `cancelled`: what they had submitted; `freed`: actors and
    processes; `finished`: runs in MLflow that said RUNNING; `pruned`: runs by attempts removed; `problems`: what could
    not be done, in words."""

    marked: dict[str, str] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    pruned: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report, a line for each kind of thing."""
        pruned = [f"{run} ({count})" for run, count in self.pruned.items()]
        kinds = {
            "marked": [f"{run} {state}" for run, state in self.marked.items()],
            "submitted runs cancelled": self.cancelled,
            "freed": self.freed,
            "finished in MLflow": self.finished,
            "unfinished checkpoint attempts removed": pruned,
            "problems": self.problems,
        }
        return [f"{kind}: {', '.join(found) or 'none'}" for kind, found in kinds.items()]


@flow(name="janitor", persist_result=False, validate_parameters=True)
def janitor(
    silent_s: Annotated[int, Field(ge=40)] = 150,
    look_back_h: Annotated[int, Field(ge=1)] = 24,
    prune: bool = True,
    overrides: Sequence[Override] = (),
) -> dict[str, Any]:
    """Mark runs whose heartbeat stopped as Crashed, and end what they and other ended runs left.

    That is their actors and processes, the runs of deployments that a dead one submitted, runs that say RUNNING in
    MLflow, and attempts at checkpoints that were never finished.

    Args:
        silent_s: Seconds without a heartbeat after which a run is dead; beats come every 30 s in these deployments.
        look_back_h: Hours: ended runs that are older are taken to be clean.
        prune: Whether to remove attempts at checkpoints that were never finished from the store.
        overrides: Where the store and the cluster are, such as `storage.url=s3://bucket/prefix`.
    """
    config = compose(list(overrides))
    prepare_environment(local_ray=False)
    findings = Findings()
    with get_client(sync_client=True) as client:
        living = mark_dead(client, timedelta(seconds=silent_s), findings)
        ended = _runs(client, (StateType.CRASHED, StateType.CANCELLED, StateType.FAILED), look_back_h)
        addresses = {cluster_address(run.parameters) for run in (*living, *ended)}
        addresses.add(cluster_address({"overrides": list(overrides)}))
        for run in ended:
            findings.freed += [f"process {pid}" for pid in kill_processes(str(run.id))]
        for address in sorted(address for address in addresses if address is not None):
            _free_cluster(client, address, findings)
        _finish_in_mlflow(client, ended, findings)
    if prune:
        store = CheckpointStore(absolute_url(config.storage.url), dict(config.storage.options))
        _prune(store, findings)
    text = "\n".join(findings.lines())
    Console().say(text)
    create_markdown_artifact("\n".join(f"- {line}" for line in findings.lines()), key="janitor", description="janitor")
    return asdict(findings)


def mark_dead(client: SyncPrefectClient, silent: timedelta, findings: Findings) -> list[FlowRun]:
    """Set runs without a sign of life within `silent` to Crashed, or Cancelled where they were being cancelled.

    That frees their concurrency slots. Returns the runs that live.
    """
    now = datetime.now(UTC)
    living = []
    for run in _runs(client, (StateType.RUNNING, StateType.CANCELLING, StateType.PENDING, StateType.PAUSED), None):
        assert run.state is not None
        # A pending run beats not yet: it has twice the time to start.
        patience = silent * (2 if run.state.type == StateType.PENDING else 1)
        if now - run.state.timestamp < patience or _has_beaten(client, run, now - patience):
            living.append(run)
            continue
        text = f"no heartbeat for {silent.total_seconds():.0f} s; marked by the janitor"
        state: Any = (Cancelled if run.state.type == StateType.CANCELLING else Crashed)(message=text)
        client.set_flow_run_state(run.id, state, force=True)
        findings.marked[str(run.id)] = state.type.value
        findings.cancelled += cancel_submitted(client, run)
    return living


def _has_beaten(client: SyncPrefectClient, run: FlowRun, since: datetime) -> bool:
    wanted = EventFilter(
        occurred=EventOccurredFilter(since=since),
        event=EventNameFilter(name=[_HEARTBEAT]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
    )
    return client.read_events(filter=wanted, limit=1).total > 0


def _runs(client: SyncPrefectClient, types: tuple[StateType, ...], hours: int | None) -> list[FlowRun]:
    """Runs of our flows in these states, the newest first; those that ended within `hours`, None for all."""
    since = None if hours is None else datetime.now(UTC) - timedelta(hours=hours)
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=list(FLOWS))),
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(types)))),
            sort=FlowRunSort.START_TIME_DESC,
            limit=_PAGE,
            offset=len(found),
        )
        found += page
        old = since is not None and page and (page[-1].end_time or page[-1].created) < since
        if len(page) < _PAGE or old:
            return [run for run in found if since is None or (run.end_time or run.created) >= since]


def _finish_in_mlflow(client: SyncPrefectClient, ended: Sequence[FlowRun], findings: Findings) -> None:
    """Runs that a killed process left RUNNING in MLflow get the status that their flow run has.

    One that was retried meanwhile is left alone.
    """
    stores: dict[tuple[str, str], dict[str, str]] = {}
    for run in ended:
        place = tracking_place(run.parameters)
        if place is not None and _has_ended(client, str(run.id)):
            status = "KILLED" if run.state_type == StateType.CANCELLED else "FAILED"
            stores.setdefault(place, {})[str(run.id)] = status
    for (uri, experiment), runs in stores.items():
        try:
            findings.finished += finish_abandoned(uri, experiment, runs)
        except Exception as error:  # Whatever a store's driver raises, or one that is not installed.
            findings.problems.append(f"MLflow: {type(error).__name__}: {error}")


def _free_cluster(client: SyncPrefectClient, address: str, findings: Findings) -> None:
    """End the actors of runs that this server knows to have ended; those of other servers' runs are left alone."""
    try:
        ended = [run for run in actors_of(address) if _has_ended(client, run)]
        findings.freed += kill_actors(address, ended)
    except FreeingError as error:
        findings.problems.append(str(error))


def _has_ended(client: SyncPrefectClient, flow_run_id: str) -> bool:
    try:
        state = client.read_flow_run(flow_run_id).state
    except ObjectNotFound:
        return False
    return state is not None and state.is_final()


def _prune(store: CheckpointStore, findings: Findings) -> None:
    """Remove unfinished attempts below each run's newest checkpoint."""
    try:
        for run in store.runs():
            removed = store.remove_unfinished(run, _UNFINISHED_S)
            if removed:
                findings.pruned[run] = removed
    except StoreError as error:
        findings.problems.append(str(error))
