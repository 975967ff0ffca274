"""`prefect.yaml`: its deployments exist, and what their schedules pass is what the flows take."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.janitor import FLOWS

DEPLOYMENTS = {
    "fp8-grpo": "fp8-grpo",
    "checkpoint": "evaluate",
    "ladder": "rollout-benchmark",
    "hourly": "janitor",
    "nightly": "precision-sweep",
}


def _deployments() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load((Path(__file__).parents[2] / "prefect.yaml").read_text())["deployments"]
    return {deployment["name"]: deployment for deployment in found}


def _flow(entrypoint: str) -> Any:
    path, _, name = entrypoint.partition(":")
    module = path.removesuffix(".py").replace("/", ".")
    if find_spec(module) is None:
        pytest.skip(f"{path} is not there yet")
    return getattr(import_module(module), name)


def test_the_deployments() -> None:
    assert _deployments().keys() == DEPLOYMENTS.keys()


@pytest.mark.parametrize(("name", "flow_name"), DEPLOYMENTS.items())
def test_a_deployment_fits_its_flow(name: str, flow_name: str) -> None:
    deployment = _deployments()[name]
    flow = _flow(deployment["entrypoint"])
    # `prefect deploy -n FLOW/NAME` looks for a function of the flow's name.
    assert flow.name == flow_name and flow.fn.__name__ == flow_name.replace("-", "_")
    schedules = deployment.get("schedules", [])
    given = [deployment.get("parameters"), *(schedule.get("parameters") for schedule in schedules)]
    for parameters in filter(None, given):
        assert flow.validate_parameters(parameters)
    assert len({schedule["slug"] for schedule in schedules}) == len(schedules)


def test_nothing_that_computes_runs_by_itself() -> None:
    active = [name for name, d in _deployments().items() for s in d.get("schedules", []) if s["active"]]
    assert active == ["hourly"]


def test_a_dead_run_starts_the_janitor_and_heartbeats_are_often_enough() -> None:
    (trigger,) = _deployments()["hourly"]["triggers"]
    beat = int(_deployments()["fp8-grpo"]["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    silent = trigger["parameters"]["silent_s"]
    # When the automation fires, the run is silent for long enough for the janitor, and has missed several beats.
    assert 4 * beat < silent < trigger["within"]
    assert set(trigger["match_related"]["prefect.resource.name"]) == set(FLOWS)
