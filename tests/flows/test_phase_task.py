"""Prefect and the arguments of a phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.phase_task import phase_task
from tests.flows.runs import environment


@dataclass
class Watched:
    """Counts how often its field is read."""

    rows: int
    read: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        if name == "rows":
            Watched.read.append(name)
        return object.__getattribute__(self, name)


def _add(first: Watched, second: int, third: int = 0) -> int:
    return first.rows + second + third


@pytest.fixture
def server() -> Any:
    with temporary_settings({PREFECT_API_URL: environment()["PREFECT_API_URL"]}):
        yield


def test_prefect_reads_no_argument_of_a_phase(server: None) -> None:
    """And the function has them as they were given; a plain task shows that the test would see it."""
    found = {}

    @flow
    def both() -> str:
        for name, called in (("phase", phase_task("adding")(_add)), ("plain", task(_add))):
            Watched.read.clear()
            assert called(Watched(2), 3, third=4) == 9
            found[name] = len(Watched.read)
        from prefect.runtime import flow_run

        return str(flow_run.id)

    run = both()
    assert found["phase"] == 1 < found["plain"]
    with get_client(sync_client=True) as client:
        names = {each.name.split("-")[0] for each in client.read_task_runs() if str(each.flow_run_id) == run}
    assert "adding" in names


def test_a_failure_of_a_phase_comes_out_as_it_is(server: None) -> None:
    @phase_task("failing")
    def failing(value: int) -> int:
        raise LookupError(f"no {value}")

    @flow
    def around() -> None:
        with pytest.raises(LookupError, match="no 7"):
            failing(7)

    around()
