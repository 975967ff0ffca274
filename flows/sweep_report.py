"""Making, storing and showing the report of a sweep: in MLflow, in a folder, and as Prefect artifacts."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow.exceptions import MlflowException
from pydantic import ValidationError

from conf.schema import RunConfig, Sweep
from flows import comparison_plots as plots
from flows.comparison import Comparison, compare, write_speedups
from flows.comparison_tables import markdown, recipe_rows
from flows.corridor import PlannedChild
from flows.failures import mlflow_status
from flows.html_report import render
from infra.mlflow_read import (
    REPORT_ROLE,
    ROLE,
    SWEEP,
    SWEEP_ID,
    MlflowReadError,
    artifact_text,
    open_client,
    report_run_id,
)
from infra.mlflow_run import RunSpec, TrackedRun

PLAN = "sweep.json"
"""Artifact of the report's run: settings of the sweep and the runs that it meant to have."""

REPORT = "report.html"


@dataclass(frozen=True)
class Written:
    """A comparison, the run that holds its report in MLflow, and its files there and in `folder`."""

    comparison: Comparison
    run_id: str
    folder: Path


def sweep_folder(config: RunConfig, sweep_id: str) -> Path:
    """Where copies of a sweep's report and the output of its runs go.

    Other programs tag their runs as they like: what is no name of a folder becomes one.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", sweep_id).lstrip(".")[:128] or "_"
    return Path(config.runs_dir).resolve() / "sweeps" / name


@contextmanager
def planned_report(
    uri: str, config: RunConfig, sweep_id: str, planned: Sequence[PlannedChild], flow_run_id: str
) -> Iterator[None]:
    """Make or reopen the run of the report and store the plan in it, before any child starts.

    `make_report` finishes it; an error that ends the block before gives it its status.
    """
    settings = config.sweep
    run = _report_run(uri, config.tracking.experiment, sweep_id, settings.name, {"flow_run_id": flow_run_id})
    plan = {"settings": settings.model_dump(mode="json"), "planned": [asdict(child) for child in planned]}
    _log_texts(run, {PLAN: json.dumps(plan, indent=1)})
    try:
        yield
    except MlflowException:
        # It does not answer; the janitor does it once the flow run has ended.
        raise
    except BaseException as error:
        run.finish(mlflow_status(error))
        raise


def stored_plan(client: Any, experiment: str, sweep_id: str) -> tuple[Sweep, tuple[PlannedChild, ...]] | None:
    """What `planned_report` stored; None for runs that no sweep of this program started."""
    run_id = report_run_id(client, experiment, sweep_id)
    text = None if run_id is None else artifact_text(client, run_id, PLAN)
    if text is None:
        return None
    plan = json.loads(text)
    try:
        # From JSON, where lists stand for tuples.
        settings = Sweep.model_validate_json(json.dumps(plan["settings"]))
    except ValidationError as error:
        raise MlflowReadError(f"sweep_id = {sweep_id}: its {PLAN} in MLflow is of another version: {error}") from error
    return settings, tuple(PlannedChild(**child) for child in plan["planned"])


def make_report(
    uri: str, config: RunConfig, sweep_id: str, own_settings: bool, folder: Path, status: str = "FINISHED"
) -> Written:
    """Compare from MLflow alone and store report, JSON and speed-ups there; copies go to `folder`.

    `status`: of the run in MLflow that holds the report.

    Gates, prices and corridor are those that the sweep ran with, unless `own_settings` asks for those of `config`.
    """
    client, experiment = open_client(uri), config.tracking.experiment
    plan = stored_plan(client, experiment, sweep_id)
    settings, planned = (config.sweep, ()) if plan is None else plan
    comparison = compare(client, experiment, sweep_id, config.sweep if own_settings else settings, planned)
    write_speedups(client, comparison)
    source = (config.sweep if own_settings else settings).prices.source
    texts = {
        REPORT: render(comparison, source),
        "report.md": markdown(comparison, source),
        "comparison.json": comparison.json(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    run = _report_run(uri, experiment, sweep_id, comparison.sweep)
    _log_texts(run, texts)
    run.finish(status)
    return Written(comparison, run.run_id, folder)


def publish_artifacts(comparison: Comparison, source: str) -> None:
    """Markdown, table and image artifacts of the flow run that is running."""
    from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

    key = artifact_key(comparison.sweep)
    create_markdown_artifact(markdown(comparison, source), key=f"{key}-report", description="comparison of the sweep")
    create_table_artifact(recipe_rows(comparison), key=f"{key}-recipes", description="recipes against the baseline")
    if comparison.variants:
        data = base64.b64encode(plots.overview(comparison, "png")).decode("ascii")
        url = f"data:image/png;base64,{data}"
        create_image_artifact(url, key=f"{key}-overview", description="accuracy, mismatch, phase times")


def artifact_key(sweep: str) -> str:
    """Keys of Prefect artifacts are lower-case letters, digits and dashes."""
    return "sweep-" + re.sub(r"[^a-z0-9]+", "-", sweep.lower()).strip("-")


def _report_run(
    uri: str, experiment: str, sweep_id: str, sweep: str, more_tags: Mapping[str, str] | None = None
) -> TrackedRun:
    known = report_run_id(open_client(uri), experiment, sweep_id)
    tags = {SWEEP_ID: sweep_id, SWEEP: sweep, ROLE: REPORT_ROLE} | dict(more_tags or {})
    name = f"{sweep_id}-report"
    return TrackedRun.open(RunSpec(uri, experiment, name, tags=tags), name, known)


def _log_texts(run: TrackedRun, texts: Mapping[str, str]) -> None:
    with TemporaryDirectory(prefix="fp8-grpo-report-") as folder:
        for name, text in texts.items():
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            run.log_artifact(path, None)
