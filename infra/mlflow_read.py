"""Reading runs back from MLflow: what a comparison needs, whoever logged it. MLflow is imported on first use."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

SWEEP_ID = "sweep_id"
SWEEP = "sweep"
ROLE = "role"
REPORT_ROLE = "sweep-report"
"""Tag `role` of the run that holds a sweep's plan and report; the runs of the sweep have no such tag."""

Series = tuple[tuple[int, float], ...]
"""(step, value), one for each step, in the order of steps."""


class LineOfStep(BaseModel):
    """A line of an artifact beside the metrics (`flows/side_records.py`): numbers of a step by name."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    kind: str
    step: int
    values: dict[str, float]


class MlflowReadError(RuntimeError):
    """MLflow does not have what was asked for, or does not answer."""


@dataclass(frozen=True)
class RunRecord:
    """One run. `series`: the metrics that were asked for; times in milliseconds since the epoch."""

    run_id: str
    name: str
    status: str
    start_ms: int
    end_ms: int | None
    tags: Mapping[str, str]
    params: Mapping[str, str]
    latest: Mapping[str, float]
    series: Mapping[str, Series] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.status == "FINISHED"


def open_client(uri: str) -> MlflowClient:
    """A client of the store at `uri`."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def sweep_runs(client: MlflowClient, experiment: str, sweep_id: str) -> list[RunRecord]:
    """Runs with the tag sweep_id, oldest first, without the run of the report; empty where there are none."""
    return [record for record in _tagged(client, experiment, SWEEP_ID, sweep_id) if ROLE not in record.tags]


def runs_of_sweeps_named(client: MlflowClient, experiment: str, sweep: str) -> list[RunRecord]:
    """Runs of all sweeps of one name, oldest first."""
    return [record for record in _tagged(client, experiment, SWEEP, sweep) if ROLE not in record.tags]


def report_run_id(client: MlflowClient, experiment: str, sweep_id: str) -> str | None:
    """The run that holds the report of a sweep, if there is one: the oldest, should two exist."""
    found = [record for record in _tagged(client, experiment, SWEEP_ID, sweep_id) if ROLE in record.tags]
    return next((record.run_id for record in found if record.tags[ROLE] == REPORT_ROLE), None)


def with_series(client: MlflowClient, record: RunRecord, prefixes: Iterable[str]) -> RunRecord:
    """The record with the history of every metric whose name begins with one of `prefixes`.

    Where a step was logged twice, what was logged last counts.
    """
    starts = tuple(prefixes)
    series: dict[str, Series] = {}
    for key in sorted(record.latest):
        if key.startswith(starts):
            points = sorted(client.get_metric_history(record.run_id, key), key=lambda point: point.timestamp)
            series[key] = tuple(sorted({point.step: _value(point.value) for point in points}.items()))
    return RunRecord(**(vars(record) | {"series": series}))


def _value(stored: float) -> float:
    """MLflow's stores keep infinity as the largest number."""
    value = float(stored)
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value


def artifact_text(client: MlflowClient, run_id: str, path: str) -> str | None:
    """A text artifact of a run; None where the run has none of that name."""
    folder, _, _ = path.rpartition("/")
    if path not in {item.path for item in client.list_artifacts(run_id, folder or None)}:
        return None
    with TemporaryDirectory(prefix="fp8-grpo-artifact-") as target:
        return Path(client.download_artifacts(run_id, path, target)).read_text(encoding="utf-8")


def artifact_lines(client: MlflowClient, run_id: str, path: str, kind: type[LineOfStep]) -> list[LineOfStep]:
    """The lines of a JSON-lines artifact; none where the run has no such artifact.

    `MlflowReadError` names run, artifact and line for what is no `kind`: anybody can log an artifact of this name.
    """
    text = artifact_text(client, run_id, path)
    found = []
    # JSON leaves the line feed alone to the file, which splitlines() would not.
    for number, line in enumerate((text or "").split("\n"), 1):
        if line:
            try:
                found.append(kind.model_validate_json(line))
            except ValidationError as error:
                wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'line'}: {e['msg']}" for e in error.errors())
                raise MlflowReadError(f"run {run_id}: {path}, line {number}: {wrong}") from error
    return found


def _tagged(client: MlflowClient, experiment: str, tag: str, value: str) -> list[RunRecord]:
    if "'" in value:
        raise MlflowReadError(f"{tag} = {value}: holds a quote; allowed: letters, digits, `.`, `_`, `-`")
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    records = [_record(run) for run in all_runs(client, found.experiment_id, f"tags.`{tag}` = '{value}'")]
    return sorted(records, key=lambda record: (record.start_ms, record.run_id))


def all_runs(client: MlflowClient, experiment_id: str, wanted: str) -> list[Run]:
    """The runs of an experiment that MLflow's filter `wanted` finds, of all pages."""
    found: list[Run] = []
    page = None
    while True:
        runs = client.search_runs([experiment_id], wanted, max_results=500, page_token=page)
        found += runs
        page = runs.token
        if not page:
            return found


def _record(run: Run) -> RunRecord:
    info, data = run.info, run.data
    tags = {key: value for key, value in data.tags.items() if not key.startswith("mlflow.")}
    name, metrics = str(info.run_name), {key: _value(value) for key, value in data.metrics.items()}
    return RunRecord(info.run_id, name, info.status, info.start_time, info.end_time, tags, dict(data.params), metrics)
