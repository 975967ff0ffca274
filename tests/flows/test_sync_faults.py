"""A sync whose engine dies or hangs in the middle: real actors in processes of their own, killed and stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle

from conf.compose import compose
from conf.schema import Cluster, Deadlines, RunConfig
from infra.ray_cluster import await_ready, ray_cluster, spawn
from tasks.actors import RolloutActor, TrainerActor
from tasks.calls import Engines, PhaseError
from tasks.engines.transport import Chunk
from tasks.sync import sync
from tests.contract.engines import linears_of, make_model

RECIPE = "fp8_rollout"
BOUND_S = 60.0
"""By far longer than an error takes to arrive, and by far shorter than the actors sleep."""

CONFIG: RunConfig = compose((f"recipe={RECIPE}", "cluster.sync_buffer_mb=1", "rollout.threads=1", "trainer.threads=1"))


class StallingRollout(RolloutActor):
    """Stops for good in its second chunk, after it has said so."""

    def prepare(self, marker: str) -> int:
        self.marker, self.chunks = Path(marker), 0
        return os.getpid()

    def receive(self, chunk: Chunk) -> None:
        super().receive(chunk)
        self.chunks += 1
        if self.chunks == 2:
            self.marker.touch()
            time.sleep(10 * BOUND_S)


class Pid(TrainerActor):
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of several chunks of 1 MiB, which is the smallest."""
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=512, intermediate_size=1024)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster(CONFIG.cluster, "sync-faults"):
        yield CONFIG.cluster


def _actors(cluster: Cluster, model_dir: Path, rollout_class: type, name: str) -> Engines:
    rollout, trainer = spawn(rollout_class, f"r-{name}", 1, cluster), spawn(Pid, f"t-{name}", 1, cluster)
    engines = Engines(rollout, trainer, CONFIG.deadlines)
    await_ready({"rollout": engines.rollout, "trainer": engines.trainer}, cluster)
    ray.get(engines.trainer.build.remote(CONFIG, str(model_dir)))
    ray.get(engines.rollout.build.remote(CONFIG, CONFIG.recipe, str(model_dir), str(model_dir)))
    return engines


def _stalling(cluster: Cluster, model_dir: Path, folder: Path, name: str) -> tuple[Engines, int]:
    """Actors whose rollout engine stops in its second chunk, and the number of its process."""
    engines = _actors(cluster, model_dir, StallingRollout, name)
    return engines, ray.get(engines.rollout.prepare.remote(str(folder / "stalled")))


def _sync(engines: Engines, cluster: Cluster) -> dict[str, float]:
    result: dict[str, float] = sync.fn(engines, CONFIG.recipe, linears_of(0, 1), cluster)
    return result


def _kill_when(marker: Path, pid: int) -> threading.Thread:
    def kill() -> None:
        deadline = time.monotonic() + BOUND_S
        while not marker.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def _fails(engines: Engines, cluster: Cluster, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(PhaseError, match=message):
        _sync(engines, cluster)
    assert time.monotonic() - start < BOUND_S


def _end(*actors: ActorHandle) -> None:
    for actor in actors:
        ray.kill(actor)


def test_a_rollout_engine_killed_in_a_sync_ends_the_phase_and_a_new_one_takes_over(
    cluster: Cluster, model_dir: Path, tmp_path: Path
) -> None:
    engines, pid = _stalling(cluster, model_dir, tmp_path, "killed")
    killer = _kill_when(tmp_path / "stalled", pid)
    _fails(engines, cluster, r"sync \(transfer\): SyncError: installing chunk [23]: the rollout engine's process died")
    killer.join()
    # The trainer is none the worse for it.
    engines = Engines(spawn(RolloutActor, "r-new", 1, cluster), engines.trainer, engines.deadlines)
    ray.get(engines.rollout.build.remote(CONFIG, CONFIG.recipe, str(model_dir), str(model_dir)))
    assert _sync(engines, cluster)["version"] == 0
    _end(engines.rollout, engines.trainer)


@pytest.mark.slow
def test_a_rollout_engine_that_hangs_in_a_sync_ends_the_phase(
    cluster: Cluster, model_dir: Path, tmp_path: Path
) -> None:
    engines, _ = _stalling(cluster, model_dir, tmp_path, "hangs")
    engines.deadlines = Deadlines(sync_s=3.0)
    late = r"the rollout engine: no answer within deadlines.sync_s = 3 s; allowed: "
    _fails(engines, cluster, rf"sync \(transfer\): LateSyncError: installing chunk [23]: {late}")
    _end(engines.rollout, engines.trainer)


@pytest.mark.slow
def test_a_trainer_killed_in_a_sync_ends_the_phase_and_leaves_the_rollout_engine_dirty(
    cluster: Cluster, model_dir: Path, tmp_path: Path
) -> None:
    engines, _ = _stalling(cluster, model_dir, tmp_path, "trainer")
    killer = _kill_when(tmp_path / "stalled", ray.get(engines.trainer.pid.remote()))
    _fails(engines, cluster, r"sync \(transfer\): the trainer's process died")
    killer.join()
    _end(engines.rollout)


@pytest.mark.slow
def test_a_trainer_that_hangs_ends_the_phase(cluster: Cluster, model_dir: Path) -> None:
    engines = _actors(cluster, model_dir, RolloutActor, "stopped")
    os.kill(ray.get(engines.trainer.pid.remote()), signal.SIGSTOP)
    engines.deadlines = Deadlines(sync_s=2.0)
    _fails(engines, cluster, r"sync \(transfer\): the trainer: no answer within 2 x deadlines.sync_s = 2 s; allowed: ")
    _end(engines.rollout, engines.trainer)
