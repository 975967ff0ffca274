"""Real servers for tests of deployments: a Prefect server, a worker, a Ray cluster; each in a session of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
DEPLOYED = "fp8-grpo/fp8-grpo"
TINY = (
    "steps=1",
    "checkpoint_every=1",
    "data.eval_prompts=64",
    "data.pool_size=3000",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "trainer.micro_batch_size=8",
    "model.warm_start.steps=25",
    "rollout.threads=1",
    "trainer.threads=1",
)
"""A run whose steps take a fraction of a second."""
_MARK = "FP8_GRPO_TEST_PROGRAM"
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(found: Callable[[], T], what: str, timeout_s: float, poll_s: float = 0.5) -> T:
    """The first true value of `found`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = found()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(poll_s)


@contextmanager
def program(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program in the background that ends with the block, and with it all that it started, in whatever session."""
    mark = uuid4().hex
    marked = {**environment, _MARK: f"{mark} {environment.get(_MARK, '')}"}
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            env=marked,
            cwd=ROOT,
            stdout=out,
            stderr=out,
            start_new_session=True,
            # Tests in the background may have SIGINT ignored, and children inherit that; a terminal has not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        end_marked(mark)
        process.wait()


def end_marked(mark: str) -> None:
    """SIGKILL for all processes that carry a mark in their environment: Ray's daemons leave their session."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def ask(method: str, url: str, body: Any = None) -> httpx.Response:
    """As Prefect's client: a server on SQLite answers 503 where another writer was first, and is asked again."""
    for attempt in range(10):
        answer = httpx.request(method, url, json=body, timeout=120)
        if answer.status_code != 503:
            break
        time.sleep(0.2 * (attempt + 1))
    return answer.raise_for_status()


class Prefect:
    """A Prefect server with a database of its own below `folder`, and its API as plain HTTP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port = free_port()
        self.api = f"http://127.0.0.1:{self._port}/api"
        dropped = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT__FLOW_RUN_ID", "RAY_ADDRESS")
        self.environment = {k: v for k, v in os.environ.items() if k not in dropped} | {
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_PROFILES_PATH": str(folder / "prefect" / "profiles.toml"),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db",
            "PREFECT_SERVER_UI_ENABLED": "false",
            "PREFECT_API_URL": self.api,
            # A worker that asks every 10 s would make each test as much longer.
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
            "PREFECT_SERVER_SERVICES_SCHEDULER_DEPLOYMENT_BATCH_SIZE": "10",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PWD": str(ROOT),
        }

    @contextmanager
    def running(self) -> Iterator[Prefect]:
        command = [*self._prefect(), "server", "start", "--host", "127.0.0.1", "--port", str(self._port)]
        with program(command, self.environment, self.folder / "server.log"):
            until(self._healthy, f"the Prefect server (see {self.folder}/server.log)", 240)
            self.post("/work_pools/", {"name": "fp8-grpo", "type": "process"})
            yield self

    @contextmanager
    def worker(self, name: str = "worker") -> Iterator[subprocess.Popen[bytes]]:
        command = [*self._prefect(), "worker", "start", "--pool", "fp8-grpo", "--name", name]
        with program(command, self.environment, self.folder / f"{name}.log") as process:
            yield process

    def deploy(self, *names: str) -> str:
        """`prefect --no-prompt deploy`, of all deployments or of some; returns its output."""
        chosen = [part for name in names for part in ("-n", name)] or ["--all"]
        command = [*self._prefect(), "--no-prompt", "deploy", *chosen]
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def cli(self, *arguments: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """`fp8-grpo` with this server."""
        program = [sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main(sys.argv[1:]))"]
        return subprocess.run(
            [*program, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )

    def places(self, runs: str = "runs") -> list[str]:
        """Overrides that keep a run's files below the folder."""
        return [f"runs_dir={self.folder / runs}", f"storage.url={self.folder / runs}/checkpoints"]

    def submit(self, parameters: Mapping[str, Any], deployment: str = DEPLOYED) -> str:
        """Id of a new flow run."""
        found = self.deployment(deployment)["id"]
        created: str = self.post(f"/deployments/{found}/create_flow_run", {"parameters": dict(parameters)})["id"]
        return created

    def deployment(self, name: str) -> dict[str, Any]:
        return self.get(f"/deployments/name/{name}")

    def slots(self, name: str = DEPLOYED) -> int:
        """Slots of a deployment's concurrency limit that are taken."""
        limit = self.deployment(name)["global_concurrency_limit"]
        return int(self.get(f"/v2/concurrency_limits/{limit['id']}")["active_slots"])

    def state(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/flow_runs/{run}")["state"]
        return found

    def await_state(self, run: str, types: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """The state of a run once it is of one of `types`."""

        def found() -> dict[str, Any] | None:
            state = self.state(run)
            assert state["type"] in types or state["type"] not in ENDED, state
            return state if state["type"] in types else None

        return until(found, f"run {run} in {types}", timeout_s) or {}

    def automation_events(self) -> list[str]:
        """What became of automations (`triggered`, `action.executed`, `action.failed`), the oldest first."""
        wanted = {"filter": {"event": {"prefix": ["prefect.automation."]}}}
        found = self.post("/events/filter", wanted)["events"]
        return [f"{e['occurred']} {e['event']} {e['payload'].get('reason', '')}".strip() for e in reversed(found)]

    def cancel(self, run: str) -> None:
        self.post(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})

    def get(self, path: str) -> Any:
        return self._request("GET", path).json()

    def post(self, path: str, body: Any) -> Any:
        return self._request("POST", path, body).json()

    def put(self, path: str, body: Any) -> None:
        self._request("PUT", path, body)

    def delete(self, path: str) -> None:
        self._request("DELETE", path)

    def _request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return ask(method, f"{self.api}{path}", body)

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.api}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    @staticmethod
    def _prefect() -> list[str]:
        return [str(Path(sys.executable).parent / "prefect")]


@contextmanager
def ray_head(folder: Path) -> Iterator[str]:
    """A Ray cluster on loopback that no run owns; yields its address.

    The path of `folder` has to be short: Ray's sockets lie below it, and take 107 characters.
    """
    port = free_port()
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}"]
    command += ["--num-cpus=8", "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=200000000"]
    command += [f"--temp-dir={folder}/ray", f"--ray-client-server-port={free_port()}"]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    with program(command, environment, folder / "ray.log") as process:

        def listens() -> bool:
            assert process.poll() is None, (folder / "ray.log").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0 and "Ray runtime started" in (
                    folder / "ray.log"
                ).read_text(errors="replace")

        until(listens, "the Ray cluster", 180)
        yield f"127.0.0.1:{port}"
