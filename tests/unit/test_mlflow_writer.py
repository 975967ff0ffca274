"""The MLflow writer on a real SQLite store and a real server that fails: nothing lost, nothing doubled."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.mlflow_run import RunSpec, TrackedRun, finish_abandoned
from infra.mlflow_writer import WriterReport
from tests.unit.mlflow_support import TIMEOUT_S, Setting, expected, free_port, mlflow_server, wait_for


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for the module (the first use takes seconds); every test has an experiment of its own."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/nested/mlflow.db"


@pytest.fixture
def setting(tmp_path: Path, uri: str) -> Setting:
    return Setting(tmp_path, uri)


def test_a_run_holds_what_the_journal_holds(setting: Setting) -> None:
    writer = setting.writer()
    assert writer.run_id is None
    writer.start()
    setting.steps(0, 3)
    setting.journal.append("eval", 0, {"eval/accuracy": 0.25, "note": "text", "ok": True, "none": None}, 77)
    setting.journal.append("bootstrap", 0, {"calibration/max_rel_change": math.nan}, 78)
    setting.journal.append("note", 0, {"text": "no numbers"}, 79)
    writer.notify()
    run_id = writer.wait_run_id(TIMEOUT_S)
    report = writer.close("FINISHED", TIMEOUT_S)
    assert report == WriterReport(pending=0, written=5, error=None)
    assert setting.points(run_id, "loss/policy") == expected(3)
    assert setting.points(run_id, "n") == [(0, 0.0, 1000), (1, 1.0, 1001), (2, 2.0, 1002)]
    assert setting.points(run_id, "eval/accuracy") == [(0, 0.25, 77)]
    run = setting.client().get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "my-run"
    assert math.isnan(run.data.metrics["calibration/max_rel_change"])
    keys = {"loss/policy", "time/step_s", "n", "eval/accuracy", "calibration/max_rel_change"}
    assert set(run.data.metrics) == keys
    params = {"steps": "2", "model.path": "null", "a.flag": "true", "lr": "0.001", "empty": ""}
    assert run.data.params == params
    assert run.data.tags["recipe"] == "fp8_e2e_kv" and run.data.tags["mlflow.runName"] == "my-run"


def test_one_batch_an_entry(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    batches = []
    real = MlflowClient.log_batch

    def counting(self: Any, run_id: str, metrics: Any = (), **rest: Any) -> Any:
        if metrics:
            batches.append((rest["synchronous"], {metric.key for metric in metrics}))
        return real(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", counting)
    setting.steps(0, 4)
    setting.run_through()
    assert batches == [(True, {"loss/policy", "time/step_s", "n"})] * 4


def test_points_arrive_while_the_run_goes_on(setting: Setting) -> None:
    writer = setting.writer()
    writer.start()
    run_id = writer.wait_run_id(TIMEOUT_S)
    for step in range(3):
        setting.steps(step, step + 1)
        writer.notify()
        wait_for(lambda count=step + 1: len(setting.points(run_id, "n")) == count)
    assert setting.client().get_run(run_id).info.status == "RUNNING"
    assert writer.close("KILLED", TIMEOUT_S).written == 3
    assert setting.client().get_run(run_id).info.status == "KILLED"


def test_a_reopened_run_goes_on_and_keeps_its_params(setting: Setting) -> None:
    setting.steps(0, 2)
    _, run_id = setting.run_through()
    setting.steps(2, 4)
    tags = {"seed": "0", "flow_run_id": "second"}
    writer = setting.writer(run_id, params={"steps": 4, "new": 1}, tags=tags)
    writer.start()
    wait_for(lambda: len(setting.points(run_id, "n")) == 4)
    assert setting.client().get_run(run_id).info.status == "RUNNING"
    assert writer.close("FINISHED", TIMEOUT_S) == WriterReport(0, 2, None)
    run = setting.client().get_run(run_id)
    assert run.data.params["steps"] == "2" and run.data.params["new"] == "1"
    assert run.data.tags["flow_run_id"] == "second"
    assert setting.points(run_id, "loss/policy") == expected(4) and setting.run_ids() == [run_id]


@pytest.mark.parametrize("known", [True, False])
def test_the_cursor_file_finds_its_run_without_an_id(setting: Setting, known: bool) -> None:
    """known=False: the process died between the creation of the run and the cursor that names it."""
    setting.steps(0, 2)
    _, run_id = setting.run_through()
    if not known:
        cursor = json.loads(setting.cursor.read_text())
        setting.cursor.write_text(json.dumps({"token": cursor["token"]}))
    setting.steps(2, 3)
    report, again = setting.run_through()
    assert again == run_id and setting.run_ids() == [run_id]
    assert report == WriterReport(0, 1, None) and setting.points(run_id, "loss/policy") == expected(3)


@pytest.mark.parametrize("damage", ["rewound", "gone", "garbage", "other journal", "ahead"])
def test_a_cursor_behind_the_store_doubles_nothing(setting: Setting, damage: str) -> None:
    setting.steps(0, 5)
    _, run_id = setting.run_through()
    cursor = json.loads(setting.cursor.read_text())
    assert (cursor["seq"], cursor["step"], cursor["run_id"]) == (5, 4, run_id)
    if damage == "gone":
        setting.cursor.unlink()
    elif damage == "garbage":
        setting.cursor.write_text('{"seq": 3')
    else:
        changes = {
            "rewound": {"seq": 4, "step": 3, "time_ms": 1003},
            "other journal": {"seq": 3, "time_ms": 5},
            "ahead": {"seq": 50},
        }
        setting.cursor.write_text(json.dumps(cursor | changes[damage]))
    setting.steps(5, 6)
    report, _ = setting.run_through(run_id)
    assert report == WriterReport(pending=0, written=1, error=None)
    assert setting.points(run_id, "loss/policy") == expected(6) and setting.points(run_id, "n")[5][0] == 5


def test_steps_computed_again_elsewhere_are_not_doubled(setting: Setting, tmp_path: Path) -> None:
    """Another machine resumes from a checkpoint older than what MLflow has: other file, other times."""
    setting.steps(0, 5)
    _, run_id = setting.run_through()
    elsewhere = Setting(tmp_path / "elsewhere", setting.uri)
    for step in range(3):
        elsewhere.steps(step, step + 1)
    for step in range(3, 7):
        elsewhere.journal.append("step", step, {"loss/policy": step / 3}, 9000 + step)
    report, again = elsewhere.run_through(run_id)
    assert again == run_id and report == WriterReport(0, 2, None)
    assert setting.points(run_id, "loss/policy") == [*expected(5), (5, 5 / 3, 9005), (6, 2.0, 9006)]


@pytest.mark.parametrize("name", ["create_run", "log_batch", "set_terminated"])
def test_a_lost_answer_is_not_logged_again(setting: Setting, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The store did what it was asked, and the connection broke before the answer, once."""
    from mlflow import MlflowClient

    calls = {"create_run": 0, "log_batch": 0, "set_terminated": 0}

    def losing(method: str) -> Callable[..., Any]:
        real = getattr(MlflowClient, method)

        def call(self: Any, *args: Any, **rest: Any) -> Any:
            answer = real(self, *args, **rest)
            if method == "log_batch" and not rest.get("metrics"):
                return answer
            calls[method] += 1
            if method == name and calls[method] == 1:
                raise ConnectionError("answer lost")
            return answer

        return call

    for method in calls:
        monkeypatch.setattr(MlflowClient, method, losing(method))
    setting.steps(0, 3)
    report, run_id = setting.run_through()
    assert calls == {"create_run": 1, "log_batch": 3, "set_terminated": 1 + (name == "set_terminated")}
    assert report == WriterReport(pending=0, written=2 if name == "log_batch" else 3, error=None)
    assert setting.run_ids() == [run_id]
    assert setting.points(run_id, "loss/policy") == expected(3)


def test_a_store_without_the_run_gets_all_of_it_anew(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    setting.steps(0, 3)
    _, run_id = setting.run_through()
    setting.client().delete_run(run_id)
    report, again = setting.run_through(run_id)
    assert again != run_id and report == WriterReport(0, 3, None)
    assert f"MLflow run {run_id} is not in sqlite://" in caplog.text
    assert setting.points(again, "loss/policy") == expected(3)
    report, third = setting.run_through("0" * 32)
    assert third not in (run_id, "0" * 32) and report.pending == 0


def test_artifacts_lie_beside_the_database(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("# report")
    writer = setting.writer()
    writer.add_artifact(tmp_path / "report.md")
    writer.add_artifact(tmp_path / "report.md", "config")
    with pytest.raises(FileNotFoundError, match=r"missing\.txt: no such file to send to MLflow"):
        writer.add_artifact(tmp_path / "missing.txt")
    writer.start()
    assert writer.close("FINISHED", TIMEOUT_S) == WriterReport(0, 0, None)
    root = Path(setting.uri.removeprefix("sqlite:///")).parent / "mlartifacts" / writer.run_id / "artifacts"
    assert (root / "report.md").read_text() == "# report" == (root / "config" / "report.md").read_text()


def test_a_failing_artifact_store_does_not_hold_up_the_run(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: TrackedRun, path: Path, artifact_path: str | None) -> None:
        raise PermissionError("artifact store is read only")

    monkeypatch.setattr(TrackedRun, "log_artifact", refuse)
    (tmp_path / "report.md").write_text("# report")
    setting.steps(0, 2)
    writer = setting.writer(patience_s=1.5)
    writer.add_artifact(tmp_path / "report.md")
    writer.start()
    wait_for(lambda: writer.run_id is not None)
    report = writer.close("FINISHED", TIMEOUT_S)
    assert report == WriterReport(1, 2, "PermissionError: artifact store is read only")
    assert setting.client().get_run(writer.run_id).info.status == "FINISHED"


def test_close_reports_the_same_again_and_refuses_other_words(setting: Setting) -> None:
    setting.steps(0, 1)
    writer = setting.writer()
    writer.start()
    with pytest.raises(ValueError, match="status='DONE': allowed are FINISHED, FAILED, KILLED"):
        writer.close("DONE", 1.0)
    first = writer.close("FAILED", TIMEOUT_S)
    assert writer.close("FINISHED", TIMEOUT_S) == first == WriterReport(0, 1, None)
    assert setting.client().get_run(writer.run_id).info.status == "FAILED"


def test_an_unreachable_store_costs_no_more_than_the_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "report.md").write_text("# report")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        setting = Setting(tmp_path, f"http://127.0.0.1:{closed.getsockname()[1]}")
        setting.steps(0, 3)
        writer = setting.writer(patience_s=2.0)
        started = time.monotonic()
        writer.start()
        writer.add_artifact(tmp_path / "report.md")
        assert time.monotonic() - started < 1.0
        assert writer.wait_run_id(0.1) is None
        wait_for(lambda: writer._error is not None)
        started = time.monotonic()
        report = writer.close("FINISHED", TIMEOUT_S)
        assert 1.5 < time.monotonic() - started < 6.0
    assert (report.pending, report.written) == (4, 0)
    assert report.error is not None and "127.0.0.1" in report.error
    assert setting.cursor.exists() and writer.run_id is None


def test_a_store_that_hangs_does_not_hold_up_the_end(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrackedRun, "log_entry", lambda self, entry: time.sleep(30))
    setting.steps(0, 2)
    writer = setting.writer()
    writer.start()
    wait_for(lambda: writer.run_id is not None)
    started = time.monotonic()
    report = writer.close("FINISHED", 1.0)
    assert time.monotonic() - started < 3.0
    assert report == WriterReport(2, 0, "no answer from the store in time; status FINISHED is not set")


def test_a_deleted_experiment_is_named(setting: Setting) -> None:
    _, run_id = setting.run_through()
    client = setting.client()
    client.delete_experiment(client.get_run(run_id).info.experiment_id)
    setting.cursor.unlink()
    setting.steps(0, 1)
    writer = setting.writer(patience_s=1.0)
    writer.start()
    report = writer.close("FINISHED", TIMEOUT_S)
    assert report.pending == 1
    assert f"experiment '{setting.experiment}' is deleted in sqlite://" in report.error


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    port = free_port()
    setting = Setting(tmp_path, f"http://127.0.0.1:{port}")
    with mlflow_server(uri, port, tmp_path):
        writer = setting.writer()
        writer.start()
        run_id = writer.wait_run_id(TIMEOUT_S)
        setting.steps(0, 2)
        writer.notify()
        wait_for(lambda: len(setting.points(run_id, "loss/policy")) == 2)
    for step in range(2, 6):
        setting.steps(step, step + 1)
        writer.notify()
        time.sleep(0.2)
    setting.journal.append("final", 5, {"eval/accuracy_bf16": 0.5, "odd": math.nan}, 42)
    writer.notify()
    wait_for(lambda: writer._error is not None)
    assert json.loads(setting.cursor.read_text())["seq"] == 2
    with mlflow_server(uri, port, tmp_path):
        report = writer.close("FINISHED", TIMEOUT_S)
        assert report == WriterReport(pending=0, written=7, error=None)
        assert setting.points(run_id, "loss/policy") == expected(6)
        assert setting.points(run_id, "eval/accuracy_bf16") == [(5, 0.5, 42)]
        assert len(setting.points(run_id, "odd")) == 1
        assert setting.client().get_run(run_id).info.status == "FINISHED"
        assert setting.run_ids() == [run_id]


def test_runs_of_ended_flow_runs_are_finished_and_no_others(uri: str, tmp_path: Path) -> None:
    def opened(name: str, tags: dict[str, str]) -> TrackedRun:
        return TrackedRun.open(RunSpec(uri, "abandoned", name, tags=tags), name, None)

    crashed, cancelled = opened("crashed", {"flow_run_id": "a"}), opened("cancelled", {"flow_run_id": "b"})
    alive, foreign = opened("alive", {"flow_run_id": "c"}), opened("foreign", {})
    done = opened("done", {"flow_run_id": "a"})
    done.finish("FINISHED")
    names = finish_abandoned(uri, "abandoned", {"a": "FAILED", "b": "KILLED"})
    assert sorted(names) == ["cancelled", "crashed"]
    client = Setting(tmp_path, uri).client()
    expected_status = {crashed: "FAILED", cancelled: "KILLED", alive: "RUNNING", foreign: "RUNNING", done: "FINISHED"}
    for run, status in expected_status.items():
        assert client.get_run(run.run_id).info.status == status
    assert finish_abandoned(uri, "abandoned", {"a": "FAILED", "b": "KILLED"}) == []
    assert finish_abandoned(uri, "no such experiment", {"a": "FAILED"}) == []
    absent = tmp_path / "none" / "mlflow.db"
    assert finish_abandoned(f"sqlite:///{absent}", "abandoned", {"a": "FAILED"}) == [] and not absent.exists()
