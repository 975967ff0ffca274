"""Sweeps whose runs are those of a deployment, and what is cancelled: a real server, a process that serves the flow."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect import flow
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from conf.compose import compose
from flows.cancellation import cancellable, settle_cancelled
from infra.prefect_server import EmbeddedPrefectServer
from tests.flows.runs import PROGRAM, fp8_grpo
from tests.flows.servers import ROOT, ask, program, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CHOICE = ("sweep.recipes=[bf16]", "sweep.seeds=[0]", "sweep.children=deployment", "sweep.deployment=fp8-grpo/served")
ENDLESS = ("steps=100000", "eval_every=100000", "checkpoint_every=100000")
_SERVE = "from flows.train import fp8_grpo; fp8_grpo.serve(name='served')"


@contextmanager
def _served(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """The deployment `fp8-grpo/served`, whose runs this process starts."""
    log = folder / "serve.log"
    with program([sys.executable, "-u", "-c", _SERVE], environment, log) as process:

        def serves() -> bool:
            assert process.poll() is None, log.read_text()
            return "being served" in log.read_text()

        until(serves, "the deployment served", 240)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[str]:
    """A server that knows the deployment, and whose runs are started; yields its url."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{folder}/prefect.db")
        server = EmbeddedPrefectServer(folder / "prefect.log")
        environment = os.environ | {"PREFECT_API_URL": server.url, "PYTHONPATH": str(ROOT)}
        try:
            server.wait(240)
            with _served(folder, environment):
                yield server.url
        finally:
            server.stop()


def _places(folder: Path) -> list[str]:
    return [f"runs_dir={folder}/runs", f"storage.url={folder}/checkpoints"]


def _await_step(folder: Path, run: str) -> None:
    journal = folder / "runs" / run / "journal.jsonl"
    until(lambda: journal.is_file() and '"kind":"step"' in journal.read_text(), f"a step of {run}", 240)


def _only_run(api: str, flow_runs: dict[str, Any]) -> dict[str, Any]:
    found: list[dict[str, Any]] = ask("POST", f"{api}/flow_runs/filter", {"flow_runs": flow_runs}).json()
    (run,) = found
    return run


def _in_mlflow(folder: Path, wanted: str) -> dict[str, str]:
    """Status of runs by name."""
    client = MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("fp8-grpo")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], wanted)
    return {run.info.run_name: run.info.status for run in found}


def test_runs_of_a_deployment_are_awaited_and_compared(folder: Path, api: str) -> None:
    done = fp8_grpo(["sweep", "smoke", *CHOICE, *_places(folder), "--sweep-id", "d"], {"PREFECT_API_URL": api})
    assert done.code == 0, done.out + (folder / "serve.log").read_text()
    figures = json.loads((folder / "runs" / "sweeps" / "d" / "comparison.json").read_text())
    assert [run["name"] for run in figures["runs"]] == ["d-bf16-s0"] and not figures["lost"]


def test_a_deployment_that_is_not_there(folder: Path, api: str) -> None:
    choice = [*CHOICE[:3], "sweep.deployment=fp8-grpo/none"]
    missing = fp8_grpo(["sweep", "smoke", *choice, *_places(folder)], {"PREFECT_API_URL": api})
    assert missing.code == 1 and "sweep.deployment=fp8-grpo/none: no such deployment" in missing.out


def test_an_interrupted_sweep_cancels_what_it_submitted(folder: Path, api: str) -> None:
    command = [*PROGRAM, "sweep", "smoke", *CHOICE, *_places(folder), *ENDLESS, "--sweep-id", "cut"]
    environment = os.environ | {"PREFECT_API_URL": api, "PYTHONPATH": str(ROOT)}
    with program(command, environment, folder / "cut.log") as process:
        _await_step(folder, "cut-bf16-s0")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, (folder / "cut.log").read_text()

    wanted = {"name": {"any_": ["cut-bf16-s0"]}}
    until(lambda: _only_run(api, wanted)["state_type"] == "CANCELLED", "the child cancelled", 120)
    assert _in_mlflow(folder, "tags.sweep_id = 'cut'") == {"cut-bf16-s0": "KILLED", "cut-report": "KILLED"}


def test_a_run_of_the_command_line_is_cancelled_from_prefect(folder: Path, api: str) -> None:
    command = [*PROGRAM, "train", *compose(["sweep=smoke"]).sweep.overrides, *_places(folder), *ENDLESS, "run_name=own"]
    environment = os.environ | {"PREFECT_API_URL": api, "PYTHONPATH": str(ROOT)}
    # As a shell starts what it puts into the background.
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    with program(ignoring, environment, folder / "own.log") as process:
        _await_step(folder, "own")
        run = _only_run(api, {"state": {"type": {"any_": ["RUNNING"]}}})
        body = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        ask("POST", f"{api}/flow_runs/{run['id']}/set_state", body)
        assert process.wait(120) == 130, (folder / "own.log").read_text()
    assert _only_run(api, {"id": {"any_": [run["id"]]}})["state_type"] == "CANCELLED"
    assert _in_mlflow(folder, "attributes.run_name = 'own'") == {"own": "KILLED"}


def test_a_run_that_ends_by_itself_is_not_cancelled(api: str) -> None:
    """The cancel came in its last seconds; without more the server would take no state but Cancelled."""

    @flow(name="short", on_cancellation=[settle_cancelled])
    def short(fails: bool) -> None:
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        ids.append(str(context.flow_run.id))
        with cancellable(context.flow_run):
            ask("POST", f"{api}/flow_runs/{ids[-1]}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
            if fails:
                raise ValueError("failed")

    ids: list[str] = []
    with temporary_settings({PREFECT_API_URL: api}):
        short(False)
        with pytest.raises(ValueError, match="failed"):
            short(True)
    assert [_only_run(api, {"id": {"any_": [run]}})["state_type"] for run in ids] == ["COMPLETED", "FAILED"]
