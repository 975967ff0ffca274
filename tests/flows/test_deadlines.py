"""Engines that hang, each in a process of its own: every phase ends at its deadline, and the engines with it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
import torch
from mlflow import MlflowClient

from conf.compose import compose
from conf.schema import Deadlines, RunConfig
from infra.ray_cluster import await_ready, ray_cluster, spawn
from tasks import preflight
from tasks.bootstrap import bootstrap, build_engines, prepare_model, rebuild_rollout
from tasks.calibrate import calibrate
from tasks.calls import Engines, LateError
from tasks.checkpoint import checkpoint
from tasks.data.examples import Dataset, Example, GraderSpec
from tasks.engines.protocols import GenerateRequest, Prompt, TokenRows
from tasks.rollout import put_to_sleep, rollout
from tasks.score import score
from tasks.stacks import Place, StackDumps, read_stacks
from tasks.sync import sync
from tasks.train import train
from tests.flows.runs import PROGRAM, SMALL, environment

BOUND_S = 60.0
"""By far longer than an error takes to arrive, and by far shorter than the actors hang."""

CONFIG: RunConfig = compose(["rollout=vllm", "rollout.sleep_level=2", "trainer=megatron", "recipe=fp8_rollout_kv"])
EXAMPLE = Example("a", "1 + 1 = ", "2")
DATASET = Dataset((EXAMPLE,), (EXAMPLE,), GraderSpec("math_verify"))
ROWS = TokenRows(torch.ones(1, 2, dtype=torch.int64), torch.tensor([2]))
REQUEST = GenerateRequest(0, (Prompt("a", (1,), (1,)), Prompt("b", (1,), (1,))), 2, 1.0, (0,))


def _stuck() -> type:
    """Of a function, so that Ray carries it as a value and its process starts without the engines' libraries."""

    class Stuck:
        """Hangs in every method of both engines' actors; a rollout has one group before that."""

        def ping(self) -> str:
            return "stuck"

        def pid(self) -> int:
            return os.getpid()

        def _hang(self, *_: object) -> None:
            import threading

            threading.Event().wait()

        warm_start = build = restore = save = train = score = calibrate = calibrate_on_batch = _hang
        sleep = offload = logprobs = report = send_weights = _hang

        def generate(self, request: object) -> Iterator[object]:
            yield (None,)
            self._hang()

    return Stuck


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(CONFIG.cluster, "deadlines"):
        yield


@pytest.fixture
def engines(cluster: None, request: pytest.FixtureRequest, tmp_path: Path) -> Engines:
    """Both hang, and have a second for each phase."""
    name, stuck = f"{request.node.name}-{os.getpid()}", _stuck()
    made = [spawn(stuck, f"{name}-{role}", 1, CONFIG.cluster) for role in ("rollout", "trainer")]
    await_ready({"rollout": made[0], "trainer": made[1]}, CONFIG.cluster)
    stacks = StackDumps(tmp_path, CONFIG.cluster)
    return Engines(made[0], made[1], Deadlines(**dict.fromkeys(Deadlines.model_fields, 1.0)), stacks=stacks)


def _await_end(*pids: int) -> None:
    deadline = time.monotonic() + BOUND_S
    for pid in pids:
        # It may go between two looks at it.
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, f"process {pid} was left running"
                time.sleep(0.05)


def _fails(engines: Engines, phase: Callable[[Engines], object], message: str) -> str:
    """The error's text."""
    pids = ray.get([actor.pid.remote() for actor in (engines.rollout, engines.trainer)], timeout=BOUND_S)
    start = time.monotonic()
    with pytest.raises(LateError, match=message) as raised:
        phase(engines)
    assert 1.0 <= time.monotonic() - start < BOUND_S
    _await_end(*pids)
    return str(raised.value)


def _reference() -> preflight.Reference:
    return preflight.Reference(ROWS, torch.tensor([1]), torch.zeros(1, 2), 0.0)


def _warm_start(engines: Engines) -> object:
    folder = Path("/nonexistent/cache")
    return prepare_model.fn(engines, compose([]), DATASET, folder, lambda step, loss: None)


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (
            lambda e: rollout.fn(e, REQUEST, lambda group: None),
            r"^rollout: the rollout engine: .* deadlines.generate_s = 1 s",
        ),
        (
            lambda e: train.fn(e, None, None, torch.zeros(1)),
            r"^train: the trainer: .* deadlines.train_s = 1 s; allowed: a",
        ),
    ],
    ids=["rollout", "train"],
)
def test_an_engine_that_hangs_ends_the_phase_and_is_ended(
    engines: Engines, phase: Callable[[Engines], object], message: str
) -> None:
    _fails(engines, phase, message)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["this machine", "another"])
def test_what_the_engines_were_at_is_written_down(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """One hangs in its method, the other waits for work; of another machine a task of Ray's reads it there."""
    if elsewhere:
        monkeypatch.setattr("tasks.stacks._here", lambda: "")
    pids = ray.get([actor.pid.remote() for actor in (engines.rollout, engines.trainer)], timeout=BOUND_S)
    said = _fails(engines, lambda e: score.fn(e, None, 0), "^score: the trainer")
    (written,) = tmp_path.glob("stacks-score-*.txt")
    assert said.endswith(f"; stacks of the engines: {written}")
    rollout_part, trainer_part = written.read_text().split("== the trainer\n")
    assert (
        rollout_part.startswith(f"== the rollout engine\npid {pids[0]} on node ") and f"pid {pids[1]} " in trainer_part
    )
    assert "in _hang" in trainer_part and "in _hang" not in rollout_part
    assert "in main_loop" in rollout_part


def test_a_folder_that_cannot_be_written_does_not_hide_the_deadline(engines: Engines, tmp_path: Path) -> None:
    tmp_path.rmdir()
    tmp_path.touch()
    said = _fails(engines, lambda e: score.fn(e, None, 0), "^score: the trainer: no answer within deadlines.score_s")
    assert "stacks of the engines: not written: " in said


def test_a_process_that_took_the_number_of_a_dead_one_gets_no_signal() -> None:
    """It would end it."""
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as other:
        assert read_stacks(Place("", other.pid, 0, 0, 0)) == f"no stacks: process {other.pid} is another\n"
        time.sleep(0.2)
        assert other.poll() is None
        other.kill()
    assert read_stacks(Place("", other.pid, 0, 0, 0)).startswith("no stacks: [Errno 2]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (
            lambda e: build_engines.fn(e, CONFIG, CONFIG.recipe, "m"),
            r"^build \(trainer\): the trainer: .* deadlines.build_s = 1 s",
        ),
        (_warm_start, r"^warm start: the trainer: .* deadlines.warm_start_s = 1 s"),
        (
            lambda e: rebuild_rollout(e, CONFIG, CONFIG.recipe, "m", "BF16 rollout"),
            r"^build \(BF16 rollout\): .*build_s",
        ),
        (
            lambda e: bootstrap.fn(e, CONFIG, DATASET, _Codec(), ()),
            r"^bootstrap \(calibrate\): .*deadlines.calibrate_s",
        ),
        (lambda e: sync.fn(e, CONFIG.recipe, (), CONFIG.cluster), r"^sync \(transfer\): .* 2 x deadlines.sync_s = 1 s"),
        (lambda e: score.fn(e, None, 0), r"^score: the trainer: .* deadlines.score_s"),
        (lambda e: calibrate.fn(e, None, CONFIG.recipe.calibration), r"^calibrate: .* deadlines.calibrate_s"),
        (lambda e: checkpoint.fn(e, ("", {}), "r", 1, {}, {}, 1), r"^checkpoint: .* deadlines.checkpoint_s"),
        (lambda e: put_to_sleep(e, CONFIG), r"^sleep: the rollout engine: .* deadlines.sleep_s"),
        (
            lambda e: preflight.preflight_compare.fn(e, _reference(), 0),
            r"^pre-flight \(score, FP8 cache\): .*preflight_s",
        ),
    ],
    ids=[
        "build",
        "warm start",
        "rebuild",
        "bootstrap",
        "sync",
        "score",
        "calibrate",
        "checkpoint",
        "sleep",
        "pre-flight",
    ],
)
def test_no_phase_waits_for_ever(engines: Engines, phase: Callable[[Engines], object], message: str) -> None:
    _fails(engines, phase, message)


class _Codec:
    """As much of a tokenizer as the bootstrap asks for."""

    eos_token_ids = (0,)

    def encode(self, text: str) -> tuple[int, ...]:
        return (1,)


@pytest.mark.slow
def test_a_stopped_process_is_ended_too(engines: Engines, tmp_path: Path) -> None:
    """As one that waits for a GPU: it cannot hear that it is to end."""
    pid = ray.get(engines.trainer.pid.remote(), timeout=BOUND_S)
    rollout_pid = ray.get(engines.rollout.pid.remote(), timeout=BOUND_S)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(LateError, match=r"^score: the trainer: no answer"):
        score.fn(engines, None, 0)
    _await_end(pid, rollout_pid)
    (written,) = tmp_path.glob("stacks-score-*.txt")
    assert "no stacks within 3 s: the process is in state T (stopped)" in written.read_text()


@pytest.mark.slow
def test_a_run_whose_trainer_is_late_fails_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [*PROGRAM, "train", *SMALL, "model.warm_start=null", "rollout.kv_preflight.enabled=false"]
    command += [f"runs_dir={tmp_path}", f"storage.url={tmp_path}/checkpoints", "deadlines.checkpoint_s=0.001"]
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(command, env=environment(), stdout=out, stderr=subprocess.STDOUT)
        started: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + 300
        while process.poll() is None:
            assert time.monotonic() < deadline, "the run did not end"
            started |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
            time.sleep(0.2)
        out.seek(0)
        said = out.read()
    assert process.returncode == 5, said
    assert (
        "LateError: checkpoint: the trainer: no answer within deadlines.checkpoint_s = 0.001 s; allowed: a larger"
        in said
    )
    _, alive = psutil.wait_procs(list(started.values()), timeout=BOUND_S)
    assert len(started) > 3 and [" ".join(child.cmdline()) for child in alive] == []
    (written,) = tmp_path.glob("*/stacks-checkpoint-*.txt")
    assert f"stacks of the engines: {written}" in said
    assert "== the rollout engine\n" in written.read_text() and "== the trainer\n" in written.read_text()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'fp8-grpo'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert written.name in {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
