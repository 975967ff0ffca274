"""What the tests of the MLflow writer share: a journal with a store, and a real server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from infra.journal import Journal
from infra.mlflow_writer import MlflowWriter, WriterReport

TIMEOUT_S = 60.0


class Setting:
    """A journal, a cursor file and a store; makes writers and looks into the store past them."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.uri, self.experiment = uri, f"exp-{uuid4().hex[:8]}"
        self.journal = Journal(folder / "journal.jsonl")
        self.cursor = folder / "mlflow.cursor"

    def writer(self, run_id: str | None = None, **changes: Any) -> MlflowWriter:
        settings: dict[str, Any] = {
            "tracking_uri": self.uri,
            "experiment": self.experiment,
            "journal": self.journal,
            "cursor_path": self.cursor,
            "run_id": run_id,
            "run_name": "my-run",
            "params": {"steps": 2, "model.path": None, "a.flag": True, "lr": 1e-3, "empty": ""},
            "tags": {"recipe": "fp8_e2e_kv", "seed": "0"},
            "patience_s": TIMEOUT_S,
        }
        return MlflowWriter(**settings | changes)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            values = {"loss/policy": step / 3, "time/step_s": 1.0, "n": step}
            self.journal.append("step", step, values, 1000 + step)

    def run_through(self, run_id: str | None = None, **changes: Any) -> tuple[WriterReport, str]:
        writer = self.writer(run_id, **changes)
        writer.start()
        report = writer.close("FINISHED", TIMEOUT_S)
        assert writer.run_id is not None
        return report, writer.run_id

    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri)

    def points(self, run_id: str, key: str) -> list[tuple[int, float, int]]:
        history = self.client().get_metric_history(run_id, key)
        return sorted((point.step, point.value, point.timestamp) for point in history)

    def run_ids(self) -> list[str]:
        client = self.client()
        experiment = client.get_experiment_by_name(self.experiment)
        return [run.info.run_id for run in client.search_runs([experiment.experiment_id])]


def expected(last: int) -> list[tuple[int, float, int]]:
    return [(step, step / 3, 1000 + step) for step in range(last)]


def wait_for(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def mlflow_server(uri: str, port: int, folder: Path) -> Iterator[None]:
    """A real tracking server; it ends by SIGKILL, as in a crash."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("ab") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=folder, env=environment, start_new_session=True
        )
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"))
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
