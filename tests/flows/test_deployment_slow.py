"""Runs that are cancelled or killed: actors and slots are freed, others go on unharmed. And a scheduled sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from mlflow import MlflowClient

from flows.environment import has_ray_token
from infra.run_actors import actors_of, processes_of
from tests.flows.servers import DEPLOYED, ROOT, TINY, Prefect, program, ray_head, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SWEEP = "precision-sweep/nightly"
RESTING = "resting"
"""Folder of the run that is stopped while others go on."""
BOUND_S = 90.0
"""Within which actors and the slot of a run must be free whose worker lives; a few seconds on an idle machine."""


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    with Prefect(tmp_path_factory.mktemp("prefect")).running() as server:
        server.deploy(DEPLOYED, "janitor/hourly", "evaluate/checkpoint", SWEEP)
        _hasten(server)
        yield server


def _hasten(prefect: Prefect) -> None:
    """Two missed beats instead of five, for the automation and for the janitor that it starts."""
    (found,) = [a for a in prefect.post("/automations/filter", {}) if a["name"] == "fp8-grpo: a run fell silent"]
    assert found["enabled"] and found["trigger"]["within"] == 160
    (action,) = found["actions"]
    assert action["type"] == "run-deployment" and action["parameters"] == {"silent_s": 150}
    body = {key: found[key] for key in ("name", "description", "enabled")}
    body |= {"trigger": found["trigger"] | {"within": 60}}
    body |= {"actions": [action | {"parameters": {"silent_s": 60, "overrides": prefect.places()[1:]}}]}
    prefect.put(f"/automations/{found['id']}", body)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster that several runs share."""
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder,
        ray_head(Path(folder)) as address,
    ):
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if has_ray_token():
            patch.setenv("RAY_AUTH_MODE", "token")
        yield address


def _long(prefect: Prefect, cluster: str, name: str, runs: str = "runs") -> list[str]:
    """Overrides of a run that ends when someone ends it.

    Its steps are long enough for a server on SQLite, which comes behind with events at thirty tasks a second: workers
    learn of a cancel by an event.
    """
    place = ["cluster=existing", f"cluster.address={cluster}", f"run_name={name}"]
    samples = ["algorithm.prompts_per_step=16", "algorithm.group_size=8"]
    endless = ["steps=100000", "eval_every=100000", "checkpoint_every=100000"]
    return [*TINY, *prefect.places(runs), *place, *samples, *endless]


def _step(prefect: Prefect, name: str, runs: str = "runs") -> int:
    """The last step of a live run; its journal is only read."""
    path = prefect.folder / runs / name / "journal.jsonl"
    return path.read_text().count('"kind":"step"') if path.is_file() else 0


def _started(prefect: Prefect, cluster: str, name: str) -> str:
    run = prefect.submit({"recipe": "bf16", "overrides": _long(prefect, cluster, name)})
    until(lambda: _step(prefect, name), f"step 1 of {name}", 240)
    assert prefect.slots() == 1 and len(actors_of(cluster)[run]) == 2
    return run


def _free(prefect: Prefect, cluster: str, run: str) -> None:
    until(lambda: run not in actors_of(cluster), "actors freed", BOUND_S)
    until(lambda: prefect.slots() == 0, "slot freed", BOUND_S)
    until(lambda: not list(processes_of(run)), "processes ended", BOUND_S)


@pytest.fixture(scope="module")
def other(prefect: Prefect, cluster: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run on the same cluster that has nothing to do with the others, not even a server; it rests meanwhile.

    Not even a store: a process that is stopped in a transaction holds SQLite's lock until it goes on.
    """
    program_text = "import sys; from flows.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program_text, "train", "recipe=bf16", *_long(prefect, cluster, "other", RESTING)]
    environment = {k: v for k, v in prefect.environment.items() if not k.startswith("PREFECT_")}
    environment |= {
        "PREFECT_HOME": str(prefect.folder / "other"),
        "PREFECT_PROFILES_PATH": str(prefect.folder / "none"),
    }
    with program(command, environment, prefect.folder / "other.log") as process:
        until(lambda: _step(prefect, "other", RESTING), "step 1 of the other run", 240)
        process.send_signal(signal.SIGSTOP)
        yield process


def _unharmed(prefect: Prefect, other: subprocess.Popen[bytes]) -> None:
    seen = _step(prefect, "other", RESTING)
    other.send_signal(signal.SIGCONT)
    until(lambda: _step(prefect, "other", RESTING) > seen, "another step of the other run", 60)
    assert other.poll() is None, (prefect.folder / "other.log").read_text()
    other.send_signal(signal.SIGSTOP)


def _flow_process(run: str) -> int:
    """The process that Prefect's worker started for a run."""
    for pid in processes_of(run):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(text in (b"prefect.engine", b"prefect.flow_engine") for text in arguments):
            return pid
    raise AssertionError([Path(f"/proc/{p}/cmdline").read_text() for p in processes_of(run)])


def test_cancel_from_the_api(prefect: Prefect, cluster: str, other: subprocess.Popen[bytes]) -> None:
    with prefect.worker("cancelling"):
        run = _started(prefect, cluster, "cancelled")
        prefect.cancel(run)
        until(lambda: prefect.state(run)["type"] == "CANCELLED", "cancelled", BOUND_S)
        _free(prefect, cluster, run)
    _unharmed(prefect, other)


def test_sigkill_of_the_flow_process(prefect: Prefect, cluster: str, other: subprocess.Popen[bytes]) -> None:
    with prefect.worker("surviving"):
        run = _started(prefect, cluster, "killed")
        os.kill(_flow_process(run), signal.SIGKILL)
        prefect.await_state(run, ["CRASHED"], BOUND_S)
        _free(prefect, cluster, run)
    _unharmed(prefect, other)


def test_sigkill_of_the_worker_alone_leaves_the_run(prefect: Prefect, cluster: str) -> None:
    with prefect.worker("dying") as worker:
        place = ["cluster=existing", f"cluster.address={cluster}", "run_name=orphan"]
        run = prefect.submit({"recipe": "bf16", "overrides": [*TINY, *prefect.places(), *place, "steps=40"]})
        until(lambda: _step(prefect, "orphan"), "step 1", 240)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        # Its output has no reader any more, and nobody would restart it: it ends by itself.
        prefect.await_state(run, ["COMPLETED"], 240)
        assert _step(prefect, "orphan") == 40
        _free(prefect, cluster, run)


def _await_janitor(prefect: Prefect, run: str) -> None:
    """The automation notices, and the new worker runs the janitor.

    A server on SQLite can be too busy to start that run, and says so; then the clock starts the next, here at once.
    """

    def refused() -> bool:
        return any("prefect.automation.action.failed" in event for event in prefect.automation_events())

    try:
        until(lambda: prefect.state(run)["type"] == "CRASHED" or refused(), f"the end of {run}", 240)
    except AssertionError as error:
        raise AssertionError(f"{error}; {prefect.automation_events()}") from error
    if prefect.state(run)["type"] != "CRASHED":
        prefect.submit({"silent_s": 60, "overrides": prefect.places()[1:]}, "janitor/hourly")
        prefect.await_state(run, ["CRASHED"], 240)

    # The janitor it asked for can be done before the server has written that it asked.
    def triggered() -> bool:
        return any("prefect.automation.triggered" in event for event in prefect.automation_events())

    until(triggered, "the automation's event", BOUND_S)


def test_a_janitor_that_never_started_is_out_of_the_way_before_one_is_asked_for(prefect: Prefect) -> None:
    """Its worker may die between taking and starting it, as at the full hour: the slot comes back before the alarm."""
    options = prefect.deployment("janitor/hourly")["concurrency_options"]
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    (trigger,) = next(found["triggers"] for found in deployments if found["name"] == "hourly")
    assert options["collision_strategy"] == "CANCEL_NEW" and options["grace_period_seconds"] < trigger["within"]


def test_worker_and_flow_killed_the_janitor_frees(
    prefect: Prefect, cluster: str, other: subprocess.Popen[bytes]
) -> None:
    with prefect.worker("lost") as worker:
        run = _started(prefect, cluster, "lost")
        os.kill(worker.pid, signal.SIGKILL)
        for pid in list(processes_of(run)):
            os.kill(pid, signal.SIGKILL)
        worker.wait()
    assert prefect.state(run)["type"] == "RUNNING" and prefect.slots() == 1
    with prefect.worker("sweeping"):
        _await_janitor(prefect, run)
        _free(prefect, cluster, run)
        client = MlflowClient(f"sqlite:///{prefect.folder}/runs/mlflow.db")
        (found,) = client.search_runs([_experiment(client)], f"tags.flow_run_id = '{run}'")
        until(lambda: client.get_run(found.info.run_id).info.status == "FAILED", "its run in MLflow ended", BOUND_S)
    assert "marked by the janitor" in prefect.state(run)["message"]
    _unharmed(prefect, other)


def _experiment(client: MlflowClient) -> str:
    found = client.get_experiment_by_name("fp8-grpo")
    assert found is not None
    return str(found.experiment_id)


def test_a_checkpoint_is_evaluated_under_another_recipe(prefect: Prefect) -> None:
    with prefect.worker("evaluating"):
        made = prefect.submit({"recipe": "bf16", "overrides": [*TINY, *prefect.places(), "run_name=made"]})
        prefect.await_state(made, ["COMPLETED"], 300)
        for recipe in ("own", "fp8_rollout_kv"):
            parameters = {"run": "made", "recipe": recipe, "overrides": prefect.places()}
            run = prefect.submit(parameters, "evaluate/checkpoint")
            prefect.await_state(run, ["COMPLETED"], 300)
    client = MlflowClient(f"sqlite:///{prefect.folder}/runs/mlflow.db")
    (logged,) = client.search_runs([_experiment(client)], "attributes.run_name = 'made'")
    # The run's own evaluation of its last step stands, and is not doubled.
    own = client.get_metric_history(logged.info.run_id, "eval/accuracy")
    assert sorted(point.step for point in own) == [0, 1]
    (other,) = client.get_metric_history(logged.info.run_id, "eval/accuracy_fp8_rollout_kv")
    assert other.step == 1 and 0 <= other.value <= 1
    assert logged.info.status == "FINISHED"


def test_a_scheduled_sweep_fires_and_leaves_its_report(prefect: Prefect) -> None:
    found = prefect.deployment(SWEEP)["id"]
    places = [*prefect.places("scheduled"), f"tracking.uri=sqlite:///{prefect.folder}/scheduled.db"]
    schedule = {
        "schedule": {"cron": "* * * * *", "timezone": "UTC"},
        "active": True,
        "slug": "each-minute",
        "parameters": {"sweep": "smoke", "overrides": [*TINY, *places, "sweep.recipes=[bf16,fp8_e2e]"]},
    }
    (made,) = prefect.post(f"/deployments/{found}/schedules", [schedule])
    since = datetime.now(UTC)

    def ours(state: str) -> list[dict[str, object]]:
        wanted = {"flow_runs": {"deployment_id": {"any_": [found]}, "state": {"type": {"any_": [state]}}}}
        return [run for run in prefect.post("/flow_runs/filter", wanted) if run["auto_scheduled"]]

    with prefect.worker("scheduled"):
        until(lambda: ours("RUNNING"), "a scheduled sweep runs", 180)
        # What was scheduled for later goes with it.
        prefect.delete(f"/deployments/{found}/schedules/{made['id']}")
        (run,) = until(lambda: ours("COMPLETED"), "it completes", 600)
    expected = datetime.fromisoformat(str(run["expected_start_time"]).replace("Z", "+00:00"))
    assert expected.second == 0 and expected > since - timedelta(minutes=1)
    (report,) = (prefect.folder / "scheduled" / "sweeps").glob("smoke-*/report.html")
    figures = json.loads(report.with_name("comparison.json").read_text())
    assert {(r["variant"], r["seed"], r["status"]) for r in figures["runs"]} == {
        (recipe, seed, "FINISHED") for recipe in ("bf16", "fp8_e2e") for seed in (0, 1)
    }
    text = report.read_text()
    assert text.startswith("<!doctype html>") and all(name in text for name in ("bf16", "fp8_e2e", "step speed-up"))
