"""A cluster of an environment without the driver's packages, with token authentication, joined by a driver."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.flows.runs import succeeded, train
from tests.two_environments import worker_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
START_S = 180.0


@dataclass(frozen=True)
class Head:
    """A running cluster."""

    address: str
    token: str


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Ray on this machine, started by the workers' Python."""
    python = worker_environment(tmp_path_factory.mktemp("cluster") / "env")
    port, client, agent = _free_ports(3)
    token = secrets.token_hex(32)
    places = {"PYTHONPATH": str(Path(__file__).parents[2])}
    environment = os.environ | LOOPBACK | places | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    # A socket's path may have 107 characters, and Ray adds 60.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=4"]
        command += [f"--port={port}", f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
        command += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=200000000"]
        process = subprocess.Popen(
            [*command, f"--temp-dir={folder}"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _await_port(port, process)
            yield Head(f"127.0.0.1:{port}", token)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"no Ray came up (exit {process.poll()})")


def _join(head: Head) -> list[str]:
    return ["cluster=existing", f"cluster.address={head.address}", "steps=1"]


def test_a_driver_with_the_token_runs_on_workers_without_prefect(head: Head, tmp_path: Path) -> None:
    succeeded(train(_join(head), tmp_path, LOOPBACK | {"RAY_AUTH_TOKEN": head.token}))


def test_a_driver_with_another_token_is_told_so(head: Head, tmp_path: Path) -> None:
    done = train(_join(head), tmp_path, LOOPBACK | {"RAY_AUTH_TOKEN": "0" * 64})
    assert done.code == 1
    assert f"could not connect to {head.address} with a token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH" in done.out


def test_a_local_run_with_actors_of_another_environment(tmp_path: Path) -> None:
    python = worker_environment(tmp_path / "env")
    succeeded(train([f"cluster.worker_python={python}", "steps=1"], tmp_path / "runs"))


def test_a_local_run_with_an_executable_that_is_no_python_ends_at_once(tmp_path: Path) -> None:
    done = train(["cluster.worker_python=/bin/true", "steps=1"], tmp_path)
    assert done.code == 1
    assert "cluster.worker_python=/bin/true on this machine: is not a Python that works (exit 0" in done.out
