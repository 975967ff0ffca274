"""A trainer of several ranks: real actors that meet over gloo, fail, die and hang; and their checkpoints."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.actor import ActorHandle

from conf.compose import compose
from conf.schema import Cluster, RunConfig
from infra.ray_cluster import await_ready, ray_cluster, spawn
from infra.store import CheckpointStore
from tasks.actors import RolloutActor
from tasks.calls import Engines, PhaseError
from tasks.calls import wait as wait_with
from tasks.deadlines import Clock, Limit
from tasks.engines.protocols import RolloutBatch
from tasks.sync import sync
from tests.contract.engines import (
    PINNED,
    ROLLOUT_ENGINES,
    TRAINER_ENGINES,
    Workbench,
    advantages,
    assert_same,
    linears_of,
    make_model,
)
from tests.flows.ranks import Follower, Leader, wait_for

RECIPE = "fp8_rollout_kv"
BOUND_S = 60.0
"""By far longer than an error takes to arrive, and by far shorter than anything that hangs would last."""


def wait(phase: str, ref: Any) -> Any:
    return wait_with(phase, ref, Clock(Limit("the test's", 2 * BOUND_S)))


def _config(ranks: int, *overrides: str) -> RunConfig:
    layout = ("trainer=megatron", "trainer.device=cpu", f"trainer.ranks={ranks}")
    pinned = [f"{key}={value}" for key, value in PINNED.items() if not key.startswith("trainer.micro")]
    return compose((f"recipe={RECIPE}", *pinned, *layout, *overrides))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(ROLLOUT_ENGINES[0], TRAINER_ENGINES[0], make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def batch(bench: Workbench) -> RolloutBatch:
    return bench.batch(RECIPE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = _config(1).cluster
    with ray_cluster(cluster, "trainer-ranks"):
        yield cluster


class Team:
    """Rank 0 and its followers."""

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self.ranks = ranks
        self.leader = spawn(Leader, f"{id(self)}-trainer-rank-0", 1, cluster)
        self.followers = [spawn(Follower, f"follower-{id(self)}-{rank}", 1, cluster) for rank in range(1, ranks)]
        actors = {f"rank {rank}": actor for rank, actor in enumerate((self.leader, *self.followers))}
        await_ready(actors, cluster)

    def build(self, bench: Workbench, *overrides: str) -> None:
        config = _config(self.ranks, *overrides)
        wait("build (trainer)", self.leader.build.remote(config, str(bench.model_dir), self.followers))

    def train(self, batch: RolloutBatch) -> dict[str, float]:
        _, _, logprobs = wait("score", self.leader.score.options(num_returns=1).remote(batch, 0))
        metrics: dict[str, float] = wait("train", self.leader.train.remote(batch, logprobs, advantages()))
        return metrics

    def end(self) -> None:
        for actor in (self.leader, *self.followers):
            ray.kill(actor)


@pytest.fixture(scope="module")
def three(cluster: Cluster) -> Iterator[Team]:
    """For tests in which nothing fails; each builds it anew."""
    team = Team(cluster, 3)
    yield team
    team.end()


@pytest.fixture
def two(cluster: Cluster, bench: Workbench) -> Iterator[Team]:
    """For a test that breaks it."""
    team = Team(cluster, 2)
    yield team
    team.end()


def _fails(call: Callable[[], object], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(PhaseError, match=message):
        call()
    assert time.monotonic() - start < BOUND_S


def _kill_when(marker: Path, actor: ActorHandle) -> threading.Thread:
    """SIGKILL the process of an actor as soon as the marker is there."""
    pid = ray.get(actor.pid.remote())

    def kill() -> None:
        wait_for(marker, BOUND_S)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_three_ranks_are_one_trainer(three: Team, bench: Workbench, batch: RolloutBatch) -> None:
    """Every method is called on every rank, with the whole batch; results are rank 0's, memory is everybody's."""
    alone = bench.trainer(RECIPE)
    three.build(bench)
    wait("calibrate", three.leader.calibrate.remote(bench.prompt_rows()))
    ray.get(three.followers[1].fill.remote(1.0))
    for step in (1, 2):
        scores = alone.score(batch)
        wanted = alone.train(batch, scores.logprobs, advantages()) | alone.calibrate(batch.rows())
        metrics, _, logprobs = wait("score", three.leader.score.remote(batch, 0))
        assert torch.equal(logprobs.nan_to_num(), scores.logprobs.nan_to_num())
        assert scores.metrics.items() <= metrics.items()
        found = wait("train", three.leader.train.remote(batch, logprobs, advantages()))
        peak = found.pop("memory/peak_gb")
        found |= wait("calibrate", three.leader.calibrate_on_batch.remote(batch, 1000))
        assert found == wanted
        seen = [ray.get(follower.seen.remote()) for follower in three.followers]
        assert [version for _, version, _ in seen] == [step, step]
        assert peak == pytest.approx(max(gb for _, _, gb in seen), rel=0.05) and peak > 1.0
    assert wait("report", three.leader.report.remote()).fingerprints == alone.report().fingerprints


def test_the_same_actors_can_be_built_again(three: Team, bench: Workbench, batch: RolloutBatch) -> None:
    found = []
    for _ in range(2):
        three.build(bench)
        metrics = three.train(batch)
        del metrics["memory/peak_gb"]
        found.append(metrics)
    assert found[0] == found[1]


def test_as_many_processes_as_ranks(three: Team, bench: Workbench) -> None:
    ref = three.leader.build.remote(_config(4), str(bench.model_dir), three.followers)
    _fails(lambda: wait("build (trainer)", ref), r"trainer.ranks = 4: 3 processes were started")


def test_a_sync_comes_from_rank_0(three: Team, bench: Workbench) -> None:
    three.build(bench)
    wait("calibrate", three.leader.calibrate.remote(bench.prompt_rows()))
    config = bench.config(RECIPE)
    rollout = spawn(RolloutActor, "rollout", 1, config.cluster)
    wait("build", rollout.build.remote(config, config.recipe, str(bench.model_dir), str(bench.model_dir)))
    sync.fn(Engines(rollout, three.leader, config.deadlines), config.recipe, linears_of(0, 1), config.cluster)
    answers = [*rollout.generate.options(num_returns="streaming").remote(bench.request())]
    assert_same(wait("generate", answers[-2]), bench.batch(RECIPE))
    ray.kill(rollout)


def _save(team: Team, store: Path, step: int) -> dict[str, Any]:
    manifest: dict[str, Any] = wait(
        "checkpoint", team.leader.save.remote((str(store), {}), "run", step, {"journal.jsonl": b"{}"}, {"step": step})
    )
    return manifest


def test_every_rank_has_its_files_in_a_checkpoint(
    three: Team, bench: Workbench, batch: RolloutBatch, tmp_path: Path
) -> None:
    """And a newest one that any of them finds damaged is skipped by all; ranks on one machine share a copy."""
    store, target = tmp_path / "store", (str(tmp_path / "store"), {})
    three.build(bench)
    with pytest.raises(PhaseError, match=f"run run at {store} has no usable checkpoint: none found"):
        wait("restore", three.leader.restore.remote(target, "run"))
    steps: dict[int, dict[str, int]] = {}
    for step in (1, 2):
        three.train(batch)
        names = {entry["path"] for entry in _save(three, store, step)["files"]}
        own = ("weights.safetensors", "optimizer.safetensors", "amax.safetensors", "trainer.json")
        assert names == {"journal.jsonl"} | {f"{rank}-{name}" for rank in range(3) for name in own}
        steps[step] = wait("report", three.leader.report.remote()).fingerprints
    three.train(batch)
    ray.get(three.leader.pretend_machines.remote(("here", "there", "there")))
    for refused, wanted in ((None, 2), (2, 1)):
        ray.get(three.followers[0].refuse.remote(refused))
        assert wait("restore", three.leader.restore.remote(target, "run"))["step"] == wanted
        assert [ray.get(follower.seen.remote())[1] for follower in three.followers] == [wanted, wanted]
        assert wait("report", three.leader.report.remote()).fingerprints == steps[wanted]
    assert [ray.get(follower.seen.remote())[0] for follower in three.followers] == [[2, 2, 1], []]


@pytest.mark.slow
def test_the_error_of_a_rank_is_named_and_ends_the_group(
    two: Team, bench: Workbench, batch: RolloutBatch, tmp_path: Path
) -> None:
    """The leader waits for the failed rank in a collective that does not end by itself: the other process lives."""
    two.build(bench)
    ray.get(two.followers[0].set_trap.remote("train", "raise", tmp_path / "trap"))
    _fails(lambda: two.train(batch), r"train: RankError: rank 1 of 2, train: ValueError: the trap of this rank$")
    later = r"report: RankError: report: the ranks of the trainer cannot go on: rank 1 of 2, train: ValueError"
    _fails(lambda: wait("report", two.leader.report.remote()), later)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(two.followers[0].ping.remote())


def test_a_killed_rank_ends_a_call_whose_leader_nothing_wakes(
    two: Team, bench: Workbench, batch: RolloutBatch, tmp_path: Path
) -> None:
    """As under NCCL, which does not notice that the other end is gone."""
    two.build(bench)
    ray.get(two.leader.set_trap.remote("train", "hang", tmp_path / "leader"))
    ray.get(two.followers[0].set_trap.remote("train", "hang", tmp_path / "trap"))
    killer = _kill_when(tmp_path / "trap", two.followers[0])
    _fails(lambda: two.train(batch), r"train: RankError: rank 1 of 2, train: its process died")
    killer.join()


@pytest.mark.slow
def test_a_killed_rank_is_named_and_not_what_gloo_says_of_it(
    two: Team, bench: Workbench, batch: RolloutBatch, tmp_path: Path
) -> None:
    two.build(bench)
    ray.get(two.followers[0].set_trap.remote("train", "hang", tmp_path / "trap"))
    killer = _kill_when(tmp_path / "trap", two.followers[0])
    _fails(lambda: two.train(batch), r"train: RankError: rank 1 of 2, train: its process died")
    killer.join()


@pytest.mark.slow
def test_ranks_that_are_late_are_named_and_ended(
    two: Team, bench: Workbench, batch: RolloutBatch, tmp_path: Path
) -> None:
    """Rank 1 hangs, and rank 0 waits for it in a collective, whose own timeout is as far away as the longest phase."""
    two.build(bench, "deadlines.train_s=2")
    pid = ray.get(two.followers[0].pid.remote())
    ray.get(two.followers[0].set_trap.remote("train", "hang", tmp_path / "trap"))
    late = r"train: LateRankError: rank 0, 1 of 2, train: no answer within deadlines.train_s = 2 s; allowed: a larger"
    _fails(lambda: two.train(batch), late)
    deadline = time.monotonic() + BOUND_S
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
def test_a_killed_leader_is_named_in_one_line(two: Team, bench: Workbench, batch: RolloutBatch, tmp_path: Path) -> None:
    two.build(bench)
    ray.get(two.followers[0].set_trap.remote("train", "hang", tmp_path / "trap"))
    killer = _kill_when(tmp_path / "trap", two.leader)
    _fails(
        lambda: two.train(batch), r"^train: trainer rank 0's process died \(pid \d+ on [^)]*\): The actor is dead .*$"
    )
    killer.join()


@pytest.mark.slow
def test_a_rank_that_cannot_be_built_is_named(two: Team, bench: Workbench) -> None:
    ray.get(two.followers[0].break_down.remote())
    message = r"build \(trainer\): RankError: rank 1 of 2, build: ValueError: this rank cannot be built$"
    _fails(lambda: two.build(bench), message)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(two: Team, bench: Workbench) -> None:
    os.kill(ray.get(two.followers[0].pid.remote()), signal.SIGSTOP)
    limit = "cluster.startup_timeout_s = 3"
    message = f"rank 0 of 2, start: EngineError: rank 1 of 2 did not come to tcp://.* within {limit}$"
    _fails(lambda: two.build(bench, "cluster.startup_timeout_s=3"), message)


@pytest.mark.slow
def test_a_rank_that_cannot_save_leaves_no_checkpoint(two: Team, bench: Workbench, tmp_path: Path) -> None:
    store = tmp_path / "store"
    two.build(bench)
    _save(two, store, 1)
    ray.get(two.followers[0].set_trap.remote("save", "raise", tmp_path / "trap"))
    _fails(lambda: _save(two, store, 2), r"checkpoint: RankError: rank 1 of 2, checkpoint: ValueError: the trap")
    newest = CheckpointStore(str(store)).latest("run")
    assert newest is not None and newest.step == 1
