"""One MLflow run, written so that every call can be repeated: nothing is created or logged twice.

Calls block and raise whatever MLflow raises; `infra.mlflow_writer` makes them in its thread and repeats
them. MLflow is imported on first use: the import takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from infra.journal import Entry
from infra.mlflow_read import all_runs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

ParamValue = str | int | float | bool | None

TOKEN_TAG = "fp8_grpo.run_token"
"""Tag by which a run is found again when the answer to its creation was lost."""


@dataclass(frozen=True)
class RunSpec:
    """What the MLflow run is called and carries from the start."""

    tracking_uri: str
    experiment: str
    run_name: str
    params: Mapping[str, ParamValue] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


def metrics_of(entry: Entry) -> dict[str, float]:
    """The numbers of an entry: float and int values, without bool, str and None."""
    return {
        key: float(value)
        for key, value in entry.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class TrackedRun:
    """An open MLflow run. Two points of one metric at one step never both reach the store."""

    def __init__(self, client: MlflowClient, run_id: str, new: bool) -> None:
        self._client = client
        self.run_id = run_id
        # Steps that the store holds, by metric. Trusted to be empty only for a run that nobody has written.
        self._stored: dict[str, set[int]] = {}
        self._doubt = not new

    @classmethod
    def open(cls, spec: RunSpec, token: str, run_id: str | None) -> TrackedRun:
        """Reopen `run_id`, else the run that carries `token`, else create one.

        A run that the store does not have (another or an emptied store) is replaced by a new one, with a
        warning. Status becomes RUNNING, tags are set, parameters that the run lacks are logged.
        """
        from mlflow import MlflowClient

        _make_sqlite_folder(spec.tracking_uri)
        client = MlflowClient(tracking_uri=spec.tracking_uri)
        run = None if run_id is None else _get_run(client, run_id)
        if run_id is not None and run is None:
            log.warning("MLflow run %s is not in %s; the journal goes to a new run", run_id, _shown(spec))
        new = False
        if run is None:
            experiment = _experiment(client, spec)
            found = client.search_runs([experiment], f"tags.`{TOKEN_TAG}` = '{token}'", max_results=1)
            new = not found
            tags = dict(spec.tags) | {TOKEN_TAG: token}
            run = found[0] if found else client.create_run(experiment, run_name=spec.run_name, tags=tags)
        _describe(client, run, spec)
        return cls(client, run.info.run_id, new)

    @classmethod
    def existing(cls, tracking_uri: str, run_id: str) -> TrackedRun | None:
        """A run to add points to, whose status and tags stay as they are; None where the store does not have it."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=tracking_uri)
        return None if _get_run(client, run_id) is None else cls(client, run_id, new=False)

    def log_entry(self, entry: Entry) -> bool:
        """Log the numbers of an entry in one batch; False when the store had all of them."""
        from mlflow.entities import Metric

        missing = [
            Metric(key, value, entry.time_ms, entry.step)
            for key, value in metrics_of(entry).items()
            if entry.step not in self._steps(key)
        ]
        if not missing:
            return False
        try:
            self._client.log_batch(self.run_id, metrics=missing, synchronous=True)
        except BaseException:
            # The store may have taken the batch although no answer came.
            self._doubt = True
            self._stored.clear()
            raise
        for metric in missing:
            self._steps(metric.key).add(entry.step)
        return True

    def log_artifact(self, path: Path, artifact_path: str | None) -> None:
        self._client.log_artifact(self.run_id, str(path), artifact_path)

    def finish(self, status: str, tags: Mapping[str, str] | None = None) -> None:
        """Set tags, then the status and the end time."""
        for key, value in (tags or {}).items():
            self._client.set_tag(self.run_id, key, value)
        self._client.set_terminated(self.run_id, status=status)

    def _steps(self, key: str) -> set[int]:
        if key not in self._stored:
            points = self._client.get_metric_history(self.run_id, key) if self._doubt else []
            self._stored[key] = {point.step for point in points}
        return self._stored[key]


def finish_abandoned(uri: str, experiment: str, ended: Mapping[str, str]) -> list[str]:
    """Give runs of ended flow runs that still say RUNNING a status: nobody else will.

    `ended`: status (FAILED or KILLED) by flow run, which MLflow runs name in their tag flow_run_id. Returns the names
    of the runs. Raises what MLflow raises.
    """
    from mlflow import MlflowClient

    database = _sqlite_file(uri)
    if database is not None and not database.exists():
        return []
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    names = []
    # All pages before the first change: what is finished is no longer found, and later pages would move up.
    for run in all_runs(client, found.experiment_id, "attributes.status = 'RUNNING'"):
        status = ended.get(run.data.tags.get("flow_run_id", ""))
        if status is not None:
            client.set_terminated(run.info.run_id, status=status)
            names.append(str(run.info.run_name))
    return names


def _get_run(client: MlflowClient, run_id: str) -> Run | None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _experiment(client: MlflowClient, spec: RunSpec) -> str:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode

    experiment = client.get_experiment_by_name(spec.experiment)
    if experiment is None:
        try:
            created: str = client.create_experiment(spec.experiment, _artifact_location(spec.tracking_uri))
            return created
        except MlflowException as error:
            # Another run got there first.
            if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
                raise
            experiment = client.get_experiment_by_name(spec.experiment)
    if experiment is None or experiment.lifecycle_stage != "active":
        raise RuntimeError(
            f"experiment {spec.experiment!r} is deleted in {_shown(spec)}: "
            "restore it (mlflow experiments restore) or choose another tracking.experiment"
        )
    found: str = experiment.experiment_id
    return found


def _describe(client: MlflowClient, run: Run, spec: RunSpec) -> None:
    from mlflow.entities import Param, RunTag

    # A parameter cannot be changed: on a resume the first value stands.
    params = [Param(key, _text(value)) for key, value in spec.params.items() if key not in run.data.params]
    tags = [RunTag(key, value) for key, value in spec.tags.items() if run.data.tags.get(key) != value]
    if params or tags:
        client.log_batch(run.info.run_id, params=params, tags=tags, synchronous=True)
    if run.info.status != "RUNNING":
        client.update_run(run.info.run_id, status="RUNNING")


def _text(value: ParamValue) -> str:
    """As it is written in a config: null, true and false instead of Python's names."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _sqlite_file(uri: str) -> Path | None:
    name = uri.partition("sqlite:///")[2]
    return Path(name) if name and name != ":memory:" else None


def _make_sqlite_folder(uri: str) -> None:
    database = _sqlite_file(uri)
    if database is not None:
        database.parent.mkdir(parents=True, exist_ok=True)


def _artifact_location(uri: str) -> str | None:
    """Artifacts beside the database; MLflow's default is the working folder of whoever came first."""
    database = _sqlite_file(uri)
    return None if database is None else (database.absolute().parent / "mlartifacts").as_uri()


def _shown(spec: RunSpec) -> str:
    """The store without a password that its url may carry."""
    scheme, separator, rest = spec.tracking_uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
