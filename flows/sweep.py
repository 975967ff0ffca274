"""The flow `precision-sweep`: recipes x seeds x further axes, and the comparison of what they did."""

# Annotations are evaluated here and now: Prefect runs a served flow where their names would not be found.
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from mlflow.exceptions import MlflowException
from prefect import flow, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from conf.problems import ConfigError
from conf.schema import Problem, RunConfig
from conf.schema.base import counted
from flows.allocation import process_age_s
from flows.cancellation import cancellable
from flows.champions import register_champions
from flows.comparison_tables import headline
from flows.environment import tracking_uri
from flows.form import Override, RunField
from flows.hooks import ENDING
from flows.notify import notify
from flows.sweep_children import ChildError, await_submitted, submit
from flows.sweep_local import LocalRuns, local_runs
from flows.sweep_plan import Child, plan_sweep
from flows.sweep_report import (
    Written,
    artifact_key,
    make_report,
    planned_report,
    publish_artifacts,
    stored_plan,
    sweep_folder,
)
from flows.unfinished import unfinished_state
from infra.mlflow_read import open_client, sweep_runs


class SweepError(RuntimeError):
    """A sweep whose runs did not all finish, or that left the regression corridor; the message says which."""


@flow(name="precision-sweep", persist_result=False, validate_parameters=True, **ENDING)
def precision_sweep(
    sweep: RunField = "nightly", overrides: Sequence[Override] = (), sweep_id: RunField | None = None
) -> Any:
    """Run recipes x seeds, compare them, and fail when a run or a recipe did.

    Args:
        sweep: Option of the group sweep: nightly, smoke, h200, recipes_h200, calibration_ablation, or your own.
        overrides: Hydra overrides such as `steps=20`, of all runs; `sweep.KEY=VALUE` changes the sweep itself.
        sweep_id: A sweep to go on with: its finished runs are not repeated. A new one gets its own.
    """
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    chosen_id = sweep_id or _own_id(sweep, context.flow_run)
    config, children = plan_sweep(sweep, overrides, chosen_id, str(context.flow_run.id))
    with cancellable(context.flow_run) as cancellation:
        try:
            written, failures, unfinished = _run_and_compare(
                config, children, chosen_id, str(context.flow_run.id), cancellation.heeded
            )
        except MlflowException as error:
            kept = f"runs that ended are in their journals; the same command with --sweep-id {chosen_id} goes on"
            raise SweepError(f"sweep {chosen_id}: MLflow: {error}; {kept}") from error
        result = {
            "sweep_id": chosen_id,
            "folder": str(written.folder),
            "unfinished": unfinished,
            "failed": list(failures),
        }
        if unfinished:
            return unfinished_state(result, f"{counted(len(unfinished), 'run')} left; --sweep-id {chosen_id} goes on")
        _fail_if_due(config, written, failures)
    return result


def _run_and_compare(
    config: RunConfig,
    children: Sequence[Child],
    sweep_id: str,
    flow_run_id: str,
    heeding: Callable[[], AbstractContextManager[None]],
) -> tuple[Written, dict[str, str], list[str]]:
    """All runs that are left to do, the report, the message of each run that failed, by its name, and those left."""
    uri = tracking_uri(config.tracking.uri, Path(config.runs_dir))
    left = left_to_do(uri, config.tracking.experiment, sweep_id, children)
    with planned_report(uri, config, sweep_id, [child.planned for child in children], flow_run_id):
        _say(f"sweep {sweep_id}: {len(children)} runs, {len(children) - len(left)} of them done before")
        here = (flow_run_id, PREFECT_API_URL.value(), process_age_s())
        with heeding(), local_runs(config, sweep_id, *here) as runs:
            failures, unfinished = _run_all(config, left, runs, len(children))
        judged = config if not unfinished else _without_corridor(config)
        status = "KILLED" if unfinished else "FINISHED"
        written = make_report(uri, judged, sweep_id, True, sweep_folder(config, sweep_id), status)
    publish_artifacts(written.comparison, config.sweep.prices.source)
    _say(f"sweep {sweep_id}: {headline(written.comparison)}\nreport: {written.folder / 'report.html'}")
    if unfinished:
        _say(f"sweep {sweep_id}: {_allocation(config)} is used up; left: {', '.join(unfinished)}")
    else:
        register_champions(uri, config, written.comparison)
    return written, failures, unfinished


def _allocation(config: RunConfig) -> str:
    """The key that bounds the sweep's runs together, or each of them."""
    whole = config.sweep.allocation_s
    return f"allocation_s = {config.allocation_s:g}" if whole is None else f"sweep.allocation_s = {whole:g}"


def _own_id(sweep: str, flow_run: FlowRun) -> str:
    """A new sweep's id, which follows from the flow run, so that a retry of that run goes on with it."""
    began = flow_run.created or flow_run.start_time or datetime.now(UTC)
    return f"{sweep}-{began:%Y%m%d-%H%M%S}-{str(flow_run.id)[:8]}"


def _say(text: str) -> None:
    """To whoever ran the command, and to the flow run's log."""
    print(text, flush=True)
    get_run_logger().info(text)


def left_to_do(uri: str, experiment: str, sweep_id: str, children: Sequence[Child]) -> list[Child]:
    """Those that no finished run of MLflow stands for, those that failed before behind all others.

    `ConfigError` where one ran with another configuration.
    """
    client = open_client(uri)
    plan = stored_plan(client, experiment, sweep_id)
    before = {} if plan is None else {child.name: child.config_digest for child in plan[1]}
    changed = [c.name for c in children if before.get(c.name, c.planned.config_digest) != c.planned.config_digest]
    if changed:
        wrong = f"{', '.join(changed)} had another configuration in it"
        raise ConfigError([str(Problem("sweep_id", sweep_id, wrong, "the same overrides, or a new sweep_id"))])
    records = sweep_runs(client, experiment, sweep_id)
    done = {record.name for record in records if record.finished}
    failed = {record.name for record in records if record.status == "FAILED"}
    return sorted((child for child in children if child.name not in done), key=lambda child: child.name in failed)


def _run_all(
    config: RunConfig, children: Sequence[Child], runs: LocalRuns, total: int
) -> tuple[dict[str, str], list[str]]:
    """Run them; returns the message of each that failed, by its name, and those that were not finished or not begun."""
    done = total - len(children)
    key, about = f"{artifact_key(config.sweep.name)}-progress", f"runs of {runs.sweep_id}"
    progress = create_progress_artifact(_percent(done, total), key=key, description=about)
    submitted = {}
    if config.sweep.children == "deployment":
        # All at once: the deployment's own limit says how many run together.
        submitted = {child.name: str(submit(child, config.sweep.deployment)) for child in children}
    deadline = time.monotonic() + config.sweep.child_timeout_s
    failures: dict[str, str] = {}
    unfinished: list[str] = []
    for child in children:
        if not runs.begins():
            unfinished.append(child.name)
            continue
        done += 1
        try:
            if _child_task(child.name)(child, runs, submitted.get(child.name), deadline):
                _say(f"{done}/{total} {child.name}: done")
            else:
                unfinished.append(child.name)
                _say(f"{done}/{total} {child.name}: not finished: its time is used up")
        except ChildError as error:
            failures[child.name] = str(error)
            _say(f"{done}/{total} {child.name}: failed: {error}")
        update_progress_artifact(progress, _percent(done, total))
    return failures, unfinished


def _without_corridor(config: RunConfig) -> RunConfig:
    """What is not there yet is no regression."""
    corridor = config.sweep.corridor.model_copy(update={"enabled": False})
    return config.model_copy(update={"sweep": config.sweep.model_copy(update={"corridor": corridor})})


def _percent(done: int, total: int) -> float:
    return round(100 * done / total, 1)


def _child_task(name: str) -> Any:
    return _run_child.with_options(task_run_name=name)


@task(name="sweep-child", cache_policy=NO_CACHE, persist_result=False)
def _run_child(child: Child, runs: LocalRuns, flow_run_id: str | None, deadline: float) -> bool:
    """One run of the sweep; whether it is finished. `ChildError` when it failed."""
    if flow_run_id is not None:
        return await_submitted(child, UUID(flow_run_id), deadline)
    return runs.run(child)


def _fail_if_due(config: RunConfig, written: Written, failures: dict[str, str]) -> None:
    comparison = written.comparison
    lines = [f"run {message}" for message in failures.values()]
    lines += [f"run {name}: {status} in MLflow" for name, status in comparison.lost.items() if name not in failures]
    lines += [f"corridor, {line}" for line in comparison.regressions]
    if not lines:
        return
    text = f"sweep {comparison.sweep_id}: " + "; ".join(lines)
    if config.sweep.corridor.notify is not None:
        notify(config.sweep.corridor.notify, f"fp8-grpo sweep {comparison.sweep_id} failed", "\n".join(lines))
    raise SweepError(text)
