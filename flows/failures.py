"""The typed errors that end a run with a message instead of a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from prefect.exceptions import TerminationSignal

from conf.problems import ConfigError
from flows import exits
from flows.allocation import RunStopped
from flows.breakers import EQUAL_REWARDS, BreakerError, NothingTrainedError
from flows.pausing import PauseError
from infra.journal import JournalError
from infra.prefect_server import PrefectServerError
from infra.ray_cluster import ClusterError
from infra.store import StoreError
from tasks.audit import AuditError
from tasks.calls import LateError
from tasks.data.examples import DataError
from tasks.data.grading import GraderError
from tasks.deadlines import LateAnswer
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


Reason = Literal[
    "done",
    "allocation",
    "interrupted",
    "config",
    "engine",
    "deadline",
    "breaker",
    "equal_rewards",
    "nothing_trained",
    "failed",
]
"""How a run ended; the MLflow tag `ended_by` of one that did."""

_EXIT_CODES: Final[Mapping[Reason, int]] = {
    "done": exits.OK,
    "allocation": exits.UNFINISHED,
    "interrupted": exits.INTERRUPTED,
    "config": exits.CONFIG_ERROR,
    "engine": exits.ENGINE_FAILED,
    "deadline": exits.LATE,
    "breaker": exits.BREAKER,
    "equal_rewards": exits.EQUAL_REWARDS,
    "nothing_trained": exits.NOTHING_TRAINED,
    "failed": exits.FAILED,
}

_REASONS: Final[tuple[tuple[tuple[type[BaseException], ...], Reason], ...]] = (
    ((RunStopped,), "allocation"),
    ((ConfigError, DataError), "config"),
    ((NothingTrainedError,), "nothing_trained"),
    ((LateError, LateAnswer), "deadline"),
    ((EngineError, AuditError), "engine"),
)
"""By type, the first that fits."""


def reason(error: BaseException) -> Reason:
    """How a run ended that an error has ended."""
    if isinstance(error, SystemExit | TerminationSignal) or is_interrupt(error):
        return "interrupted"
    if isinstance(error, BreakerError):
        return "equal_rewards" if error.metric == EQUAL_REWARDS else "breaker"
    return next((found for types, found in _REASONS if isinstance(error, types)), "failed")


def run_failed(error: Exception) -> int:
    """Say in a line what ended a run; its exit code."""
    return exits.failed(error, _EXIT_CODES[reason(error)])


def is_unreachable_server(error: BaseException) -> bool:
    """Whether a Prefect server did not answer, for which Prefect has no type of its own."""
    return type(error) is RuntimeError and "Failed to reach API" in str(error)


RUN_FAILURES = (
    AuditError,
    BreakerError,
    ClusterError,
    DataError,
    EngineError,
    GraderError,
    JournalError,
    NothingTrainedError,
    PauseError,
    PrefectServerError,
    StoreError,
)
