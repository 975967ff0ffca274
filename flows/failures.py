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
