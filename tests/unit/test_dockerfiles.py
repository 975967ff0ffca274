"""Images: what their files say, that pins of both fit one another and the project, and that the sources suffice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from infra.provenance import git_commit
from tests.container_files import copied, dockerfile_problems, instructions
from tests.two_environments import worker_environment

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "infra" / "docker"
IGNORED = (ROOT / ".dockerignore").read_text()
NAMES = ("driver", "worker")
DRIVER_ALONE = {
    "prefect", "mlflow", "hydra-core", "reasoning-gym", "math-verify", "matplotlib", "rich", "fastapi", "sqlalchemy",
}  # fmt: skip
"""Of the project's dependencies, those that engines' actors do not need. rich and fastapi come along with vLLM."""

GOOD = """
ARG BASE=python:3.12.12-slim
FROM ${BASE}
COPY pyproject.toml ./
RUN pip install --no-deps --no-cache-dir .
USER 10001
CMD ["python"]
"""


def _text(name: str) -> str:
    return (DOCKER / f"{name}.Dockerfile").read_text()


def _pins(name: str) -> dict[str, str]:
    found = {}
    for line in (DOCKER / f"{name}.txt").read_text().splitlines():
        if line.startswith(("#", "--")):
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==([\w.+]+)", line)
        assert match, f"{name}.txt: {line!r} is no pin"
        found[match[1]] = match[2]
    return found


def _dependencies() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {found.name: found for found in map(Requirement, project["dependencies"])}


@pytest.mark.parametrize("name", NAMES)
def test_a_dockerfile_has_no_problem(name: str) -> None:
    assert dockerfile_problems(_text(name), ROOT, IGNORED) == []


def test_the_good_example_has_no_problem() -> None:
    assert dockerfile_problems(GOOD, ROOT, IGNORED) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("python:3.12.12-slim", "python", "no version is pinned"),
        ("python:3.12.12-slim", "python:latest", "no version is pinned"),
        ("USER 10001", "", "runs as root"),
        ("USER 10001", "USER 0", "runs as 0"),
        ("COPY pyproject.toml", "ADD pyproject.toml", "use COPY"),
        ("COPY pyproject.toml", "COPY setup.cfg", "setup.cfg: is not in the repository"),
        ("COPY pyproject.toml", "COPY tests", "tests: .dockerignore leaves it out"),
        ("--no-deps ", "", "pip installs what no file pins"),
        ("--no-cache-dir ", "", "pip leaves its cache"),
        ("RUN pip", "RUN apt-get install -y git && pip", "apt-get leaves lists"),
        ("RUN pip", "RUN curl https://example.org/x | sh && pip", "runs what it downloads"),
        ('CMD ["python"]', "CMD python", "a shell would stand between"),
        ("USER 10001", "ENV S3_SECRET_KEY=x\nUSER 10001", "a secret in the image"),
    ],
)
def test_a_mistake_is_found(right: str, wrong: str, said: str) -> None:
    assert GOOD.count(right) == 1
    found = dockerfile_problems(GOOD.replace(right, wrong), ROOT, IGNORED)
    assert any(said in problem for problem in found), found


def test_an_image_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8_GRPO_COMMIT", raising=False)
    assert git_commit(tmp_path) == "unknown"
    monkeypatch.setenv("FP8_GRPO_COMMIT", "0123abc")
    assert git_commit(tmp_path) == "0123abc"
    assert ("ENV", "FP8_GRPO_COMMIT=${COMMIT}") in instructions(_text("driver"))


def test_versions_of_the_engines() -> None:
    worker, driver = _pins("worker"), _pins("driver")
    wanted = {"vllm": "0.26.0", "megatron-core": "0.19.2", "transformer-engine-cu13": "2.19.0", "torch": "2.11.0"}
    assert {name: worker[name] for name in wanted} == wanted
    assert ("ARG", "TRANSFORMER_ENGINE=2.19.0") in instructions(_text("worker"))
    assert not {"vllm", "megatron-core", "transformer-engine-cu13", "triton"} & driver.keys()
    assert not any(name.startswith("nvidia-") for name in driver)
    assert not {"prefect", "mlflow", "hydra-core"} & worker.keys()


def test_what_both_have_is_of_one_version() -> None:
    worker, driver = _pins("worker"), _pins("driver")
    shared = worker.keys() & driver.keys()
    assert {"ray", "torch", "pydantic", "numpy", "transformers"} <= shared
    assert {n: (worker[n], driver[n]) for n in shared if Version(worker[n]).public != Version(driver[n]).public} == {}
    assert Version(driver["torch"]).local == "cpu"


def test_both_have_one_python() -> None:
    assert "python:3.12." in _text("driver") and "python3.12 -m venv" in _text("worker")


def test_pins_are_what_the_project_asks_for() -> None:
    dependencies = _dependencies()
    driver, worker = _pins("driver"), _pins("worker")
    assert DRIVER_ALONE <= dependencies.keys() <= driver.keys()
    assert dependencies.keys() - DRIVER_ALONE <= worker.keys()
    for name, wanted in dependencies.items():
        for pins in (driver, worker):
            assert name not in pins or wanted.specifier.contains(pins[name]), f"{wanted}: {pins[name]}"


def test_the_workers_requirements_are_in_its_pins() -> None:
    lines = (DOCKER / "worker.in").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {found.name for found in wanted} >= _dependencies().keys() - DRIVER_ALONE
    pins = _pins("worker")
    assert [str(found) for found in wanted if not found.specifier.contains(pins[found.name])] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_build_has_what_its_metadata_names(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"]} <= set(copied(_text(name)))


def test_the_workers_sources_suffice_for_its_actors(tmp_path: Path) -> None:
    python = worker_environment(tmp_path / "env")
    for source in ("conf", "infra", "tasks"):
        assert source in copied(_text("worker"))
        shutil.copytree(ROOT / source, tmp_path / "src" / source, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import tasks.actors, tasks.followers; print(tasks.actors.__file__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "src/tasks/actors.py")), done.stderr
