"""The typed errors that end a run with a message instead of a traceback."""

from __future__ import annotations

from typing import Literal

from prefect.exceptions import TerminationSignal

from flows.allocation import RunStopped
from infra.journal import JournalError
from infra.prefect_server import PrefectServerError
from infra.ray_cluster import ClusterError
from infra.store import StoreError
from tasks.audit import AuditError
from tasks.data.examples import DataError
from tasks.data.grading import GraderError
from tasks.engines.protocols import EngineError


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C stands behind an error: Prefect turns one that meets the start of a task into another error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def mlflow_status(error: BaseException) -> Literal["FAILED", "KILLED"]:
    """Status of an MLflow run that an error ends: KILLED for Ctrl-C, for SIGTERM, which ends a cancelled run, and where
    it stopped in time to go on later.

    SIGTERM is a SystemExit where Ray is connected, and an error of Prefect's elsewhere.
    """
    ended = isinstance(error, SystemExit | TerminationSignal | RunStopped)
    return "KILLED" if ended or is_interrupt(error) else "FAILED"


def is_unreachable_server(error: BaseException) -> bool:
    """Whether a Prefect server did not answer, for which Prefect has no type of its own."""
    return type(error) is RuntimeError and "Failed to reach API" in str(error)


RUN_FAILURES = (
    AuditError,
    ClusterError,
    DataError,
    EngineError,
    GraderError,
    JournalError,
    PrefectServerError,
    StoreError,
)
