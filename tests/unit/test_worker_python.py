"""Actors in an environment of their own: what is refused, what they import, and that they really run there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import ray

from conf.schema import Cluster
from infra.device import gpu_count
from infra.ray_cluster import ClusterError, await_ready, cluster_nodes, ray_cluster, spawn
from infra.worker_python import problem_here, problem_on_nodes
from tasks.actors import RolloutActor, TrainerActor
from tasks.followers import FollowerActor
from tests.two_environments import DRIVER_ONLY, worker_environment

OURS = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worker_environment(tmp_path_factory.mktemp("worker") / "env")


def _stand_in(folder: Path, answer: str) -> str:
    """An executable that prints `answer` whatever it is asked."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"python": "2.7", "ray": "RAY"}', f"is Python 2.7; allowed: {OURS}, the driver's"),
        (f'{{"python": "{OURS}", "ray": "1.0"}}', f"has Ray 1.0; allowed: {ray.__version__}, the driver's"),
        (f'{{"python": "{OURS}", "ray": null}}', f"has no Ray; allowed: {ray.__version__}, the driver's"),
        ("hello", "is not a Python that works (exit 0, it said: hello)"),
    ],
)
def test_another_python_or_ray_is_refused(tmp_path: Path, answer: str, said: str) -> None:
    executable = _stand_in(tmp_path, answer.replace("RAY", ray.__version__))
    found = problem_here(Cluster(worker_python=executable))
    assert found is not None and found.startswith(f"cluster.worker_python={executable} on this machine: {said}")


def test_an_executable_that_is_not_there_is_refused_before_ray_starts(tmp_path: Path) -> None:
    cluster = Cluster(worker_python=str(tmp_path / "none"))
    said = r"none on this machine: could not be run: .*No such file"
    with pytest.raises(ClusterError, match=said), ray_cluster(cluster, "refused"):
        pass
    assert not ray.is_initialized()


def test_a_fit_environment_has_no_problem(python: Path) -> None:
    assert problem_here(Cluster(worker_python=str(python))) is None
    assert problem_here(Cluster()) is None


def test_the_actors_modules_need_nothing_of_the_driver(python: Path) -> None:
    modules = ["tasks.actors", "tasks.followers", "tasks.engines.torch_rollout", "tasks.engines.torch_trainer"]
    code = f"import sys, {', '.join(modules)}\nprint(sorted(m for m in sys.modules if m.split('.')[0] == 'flows'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=240, env=_environment())
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(("visible", "count"), [(None, 3), ("0,2", 2), ("", 0), ("0,1,2,3", 3)])
def test_a_driver_with_torch_for_cpu_counts_gpus_by_their_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    for address in ("0000:18:00.0", "0000:2a:00.0", "0000:3a:00.0"):
        (tmp_path / address).mkdir()
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (gpu_count(tmp_path), gpu_count(tmp_path / "none")) == (count, 0)


class _Where:
    """Tells where it runs."""

    def ping(self) -> str:
        return "where"

    def prefix(self) -> str:
        return sys.prefix

    def finds(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if find_spec(name) is not None]


@pytest.fixture(scope="module")
def cluster(python: Path) -> Iterator[Cluster]:
    """A local Ray of the driver's environment."""
    patch = pytest.MonkeyPatch()
    for name, value in (_environment() | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}).items():
        patch.setenv(name, value)
    cluster = Cluster(worker_python=str(python), startup_timeout_s=240)
    with ray_cluster(cluster, "two-environments"):
        yield cluster
    patch.undo()


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.slow
def test_actors_run_there_without_the_drivers_packages(cluster: Cluster, python: Path) -> None:
    kinds = {"rollout": RolloutActor, "trainer": TrainerActor, "follower": FollowerActor, "where": _Where}
    actors = {name: spawn(kind, f"two-{name}", 1, cluster) for name, kind in kinds.items()}
    await_ready(actors, cluster)
    assert ray.get(actors["where"].prefix.remote()) == str(python.parents[1]) != sys.prefix
    assert ray.get(actors["where"].finds.remote(DRIVER_ONLY)) == []
    assert ray.get(actors["where"].finds.remote(("ray", "torch", "tasks"))) == ["ray", "torch", "tasks"]
    for actor in actors.values():
        ray.kill(actor)


@pytest.mark.slow
def test_every_node_of_a_cluster_is_asked(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster_nodes() and problem_on_nodes(cluster) is None
    wrong = cluster.model_copy(update={"worker_python": _stand_in(tmp_path, '{"python": "2.7", "ray": null}')})
    assert "is Python 2.7" in str(problem_on_nodes(wrong))
    gone = cluster.model_copy(update={"worker_python": str(tmp_path / "none")})
    assert "could not be run" in str(problem_on_nodes(gone)) and "No such file" in str(problem_on_nodes(gone))
