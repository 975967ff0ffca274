"""A deployment of `prefect.yaml`, run by a real worker on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from infra.journal import Journal
from infra.run_actors import processes_of
from tests.flows.servers import DEPLOYED, TINY, Prefect

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    with Prefect(tmp_path_factory.mktemp("prefect")).running() as server:
        server.deploy(DEPLOYED)
        yield server


def test_a_submitted_run_completes_on_a_worker(prefect: Prefect) -> None:
    with prefect.worker():
        done = prefect.cli("submit", "recipe=fp8_e2e", *TINY, *prefect.places(), "run_name=sent", "--watch")
    assert done.returncode == 0, done.stdout + (prefect.folder / "worker.log").read_text()
    first, *states = done.stdout.splitlines()
    assert "/runs/flow-run/" in first and states[-1] == "Completed"
    run = first.rpartition("/")[2]
    parameters = prefect.get(f"/flow_runs/{run}")["parameters"]
    assert parameters["recipe"] == "fp8_e2e" and parameters["steps"] == 1
    assert "run_name=sent" in parameters["overrides"] and "steps=1" not in parameters["overrides"]
    journal = Journal(prefect.folder / "runs" / "sent" / "journal.jsonl")
    last = journal.last("step")
    assert last is not None and last.step == 1
    journal.close()
    assert list(processes_of(run)) == [] and prefect.slots() == 0


def test_the_server_refuses_what_the_form_refuses(prefect: Prefect) -> None:
    for parameters, named in (
        ({"recipe": "fp4"}, "fp4"),
        ({"overrides": ["a space"]}, "a space"),
        ({"steps": 0}, "0"),
    ):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            prefect.submit(parameters)
        assert refused.value.response.status_code in (409, 422) and named in refused.value.response.text


def test_submit_names_a_deployment_that_is_not_there(prefect: Prefect) -> None:
    unknown = prefect.cli("submit", "--deployment", "fp8-grpo/absent")
    assert unknown.returncode == 2 and "fp8-grpo/absent" in unknown.stdout and "make deploy" in unknown.stdout


def test_schedules_are_off_and_carry_their_parameters(prefect: Prefect) -> None:
    found = prefect.deployment(DEPLOYED)
    by_slug = {schedule["slug"]: schedule for schedule in found["schedules"]}
    assert by_slug.keys() == {"weekly-fp8-e2e-kv", "weekly-bf16"}
    assert not any(schedule["active"] for schedule in by_slug.values())
    assert by_slug["weekly-bf16"]["parameters"] == {"recipe": "bf16", "seed": 0}
    assert found["global_concurrency_limit"]["limit"] == 1
    assert found["concurrency_options"]["collision_strategy"] == "ENQUEUE"
