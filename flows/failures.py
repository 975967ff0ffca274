"""The typed errors that end a run with a message instead of a traceback."""

from __future__ import annotations

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
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


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
