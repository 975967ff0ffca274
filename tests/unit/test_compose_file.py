"""The Compose file: its schema, names, secrets and health checks; and Docker's own word where a client is."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.container_files import compose_problems, documented, variables

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "infra" / "docker"
TEXT = (FOLDER / "compose.yaml").read_text()
ENV = (FOLDER / ".env.example").read_text()
SCHEMA = json.loads((ROOT / "tests" / "assets" / "compose_spec" / "compose-spec.json").read_text())


def _content() -> Any:
    return yaml.safe_load(TEXT)


def _against_schema(content: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(content)]


def test_it_fits_the_compose_specification() -> None:
    assert _against_schema(_content()) == []


def test_the_schema_finds_a_misspelt_key() -> None:
    content = _content()
    content["services"]["worker"]["health_check"] = {}
    assert any("health_check" in message for message in _against_schema(content))


def test_it_has_no_problem() -> None:
    assert compose_problems(_content(), TEXT, ENV, FOLDER) == []


def _set(*path: str, value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("services", "worker", "depends_on", "redis", value={"condition": "service_started"}), "no such service"),
        (_set("services", "prefect", "healthcheck", value=None), None),
        (_set("services", "s3", "image", value="chrislusf/seaweedfs:latest"), "no version is pinned"),
        (_set("services", "s3", "volumes", value=["s4:/data"]), "volume s4 is not declared"),
        (_set("services", "s3-bucket", "volumes", value=["./no.sh:/no.sh"]), "volume ./no.sh: no such file"),
        (_set("services", "s3", "networks", value=["insid"]), "network insid is not declared"),
        (_set("services", "s3-bucket", "restart", value="always"), "it is started again when it ends"),
        (_set("services", "mlflow", "ports", value=["5000:5000"]), "is not bound to BIND_ADDRESS"),
        (_set("services", "prefect", "build", "dockerfile", value="Dockerfile"), "no Dockerfile"),
        (_set("volumes", "more", value=None), "volumes: more is not used"),
    ],
)
def test_a_mistake_is_found(change: Callable[[Any], None], said: str | None) -> None:
    content = _content()
    change(content)
    if said is None:
        del content["services"]["prefect"]["healthcheck"]
        said = "depends_on prefect: it has no health check"
    assert any(said in problem for problem in compose_problems(content, TEXT, ENV, FOLDER))


@pytest.mark.parametrize(
    ("text", "env", "said"),
    [
        (TEXT + "# end\nx-more: ${MORE:-1}\n", ENV, "${MORE}: is not explained"),
        (TEXT, ENV + "\n# Not used.\nMORE=1\n", "MORE is not used"),
        (TEXT.replace("${S3_SECRET_KEY:?set", "${S3_SECRET_KEY:-set"), ENV, "a secret needs"),
        (TEXT, ENV.replace("S3_SECRET_KEY=", "S3_SECRET_KEY=minioadmin"), "a secret needs"),
        (TEXT, ENV.replace("MLFLOW_PORT=5000", "MLFLOW_PORT=5001"), "its default differs"),
    ],
)
def test_a_variable_that_is_wrong_is_found(text: str, env: str, said: str) -> None:
    assert any(said in problem for problem in compose_problems(_content(), text, env, FOLDER))


def test_it_has_the_servers() -> None:
    services = _content()["services"]
    assert services.keys() == {"prefect", "prefect-db", "mlflow", "mlflow-db", "s3", "s3-bucket", "worker"}
    databases = [service for name, service in services.items() if name.endswith("-db")]
    assert all(service["networks"] == ["inside"] and "ports" not in service for service in databases)
    assert _content()["networks"]["inside"]["internal"] is True


def test_docker_accepts_it(tmp_path: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("no docker compose here")
    env = tmp_path / ".env"
    filled = {name: value or "filled" for name, value in documented(ENV).items()}
    env.write_text("".join(f"{name}={value}\n" for name, value in filled.items()))
    command = [docker, "compose", "--env-file", str(env), "-f", str(FOLDER / "compose.yaml"), "config", "--quiet"]
    clean = {name: value for name, value in os.environ.items() if name not in variables(TEXT)}
    done = subprocess.run(command, capture_output=True, text=True, env=clean, timeout=60)
    assert done.returncode == 0, done.stderr


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_health_check_tells_by_its_exit_code() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        codes = {path: _healthy(f"{url}{path}") for path in ("/health", "/other")}
        server.shutdown()
        thread.join()
    assert codes == {"/health": 0, "/other": 1}
    assert _healthy(f"{url}/health") == 1


def _healthy(url: str) -> int:
    return subprocess.run([sys.executable, FOLDER / "healthy.py", url], capture_output=True, timeout=60).returncode
