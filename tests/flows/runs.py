"""Starting the command line as a person would, killing it, and reading what it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from mlflow import MlflowClient

from flows.record import MEASURED
from infra.journal import Journal
from infra.store import CheckpointStore

FEW_SAMPLES = (
    "steps=6",
    "eval_every=3",
    "checkpoint_every=2",
    "data.eval_prompts=64",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "trainer.micro_batch_size=8",
)
SMALL = (*FEW_SAMPLES, "model.warm_start.steps=25", "data.pool_size=3000")
"""A run that takes seconds and still goes through every phase, with two micro-batches an update."""

PROGRAM = (sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main(sys.argv[1:]))")


@dataclass(frozen=True)
class Finished:
    """Exit code and output of a command."""

    code: int
    out: str


def command(arguments: Sequence[str], runs_dir: Path, base: Sequence[str] = SMALL) -> list[str]:
    """The command line of a training run whose files stay below `runs_dir`."""
    places = [f"runs_dir={runs_dir}", f"storage.url={runs_dir}/checkpoints"]
    return [*PROGRAM, "train", *base, *places, *arguments]


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL")}
    places = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return clean | {"PYTHONPATH": os.pathsep.join(places)} | dict(extra or {})


def train(
    arguments: Sequence[str],
    runs_dir: Path,
    environment: Mapping[str, str] | None = None,
    base: Sequence[str] = SMALL,
) -> Finished:
    """Run to the end."""
    done = subprocess.run(
        command(arguments, runs_dir, base),
        env=_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return Finished(done.returncode, done.stdout)


def succeeded(done: Finished) -> Finished:
    """What it was given, for a command that ended with 0."""
    assert done.code == 0, done.out
    return done


def fp8_grpo(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Finished:
    """Any command of `fp8-grpo`, to its end."""
    done = subprocess.run(
        [*PROGRAM, *arguments],
        env=_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    return Finished(done.returncode, done.stdout)


def train_and_kill(
    arguments: Sequence[str], runs_dir: Path, run: str, after_step: int, environment: Mapping[str, str] | None = None
) -> None:
    """SIGKILL the driver as soon as `after_step` is in the journal, that is inside the step after it."""
    process = subprocess.Popen(
        command([*arguments, f"run_name={run}"], runs_dir),
        env=_environment(environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _await_step(process, runs_dir / run / "journal.jsonl", after_step)
    children = psutil.Process(process.pid).children(recursive=True)
    time.sleep(0.15)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _sweep(children)


def train_and_interrupt(
    arguments: Sequence[str], runs_dir: Path, run: str, after_step: int
) -> tuple[Finished, list[str]]:
    """Ctrl-C as a terminal sends it: SIGINT to the whole process group. Also returns what was left running."""
    process = subprocess.Popen(
        command([*arguments, f"run_name={run}"], runs_dir),
        env=_environment(None),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A runner in the background may have SIGINT ignored, and children inherit that; a terminal has not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    _await_step(process, runs_dir / run / "journal.jsonl", after_step)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    _, alive = psutil.wait_procs(children, timeout=60)
    return Finished(process.returncode, out), [" ".join(p.cmdline()) for p in alive]


def _await_step(process: subprocess.Popen[str] | subprocess.Popen[bytes], journal: Path, step: int) -> None:
    deadline = time.monotonic() + 480
    needle = f'"kind":"step","step":{step},'
    while not (journal.is_file() and needle in journal.read_text()):
        assert process.poll() is None, f"the run ended before step {step}"
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.02)


def _sweep(children: list[psutil.Process]) -> None:
    """Ray's helpers notice the death of their owner within a minute; the next start need not wait for it."""
    _, alive = psutil.wait_procs(children, timeout=3)
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=10)


def journal_of(runs_dir: Path, run: str) -> Journal:
    """The journal of a finished run."""
    return Journal(runs_dir / run / "journal.jsonl")


def points(runs_dir: Path, run: str) -> dict[tuple[str, int], list[float]]:
    """All points of the run in MLflow by (metric, step), without those that are measured on the machine."""
    client = MlflowClient(f"sqlite:///{runs_dir}/mlflow.db")
    experiment = client.get_experiment_by_name("fp8-grpo")
    assert experiment is not None
    named = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{run}'")
    # A run that began anew without its checkpoint left an unfinished one.
    (found,) = [each for each in named if each.info.status == "FINISHED"] or named
    collected: dict[tuple[str, int], list[float]] = {}
    for key in found.data.metrics:
        if not key.startswith(MEASURED):
            for point in client.get_metric_history(found.info.run_id, key):
                collected.setdefault((key, point.step), []).append(point.value)
    return collected


def final_weights(url: str, run: str, options: Mapping[str, object] | None = None, step: int = 6) -> dict[str, str]:
    """SHA-256 of weights, optimiser and state in the newest checkpoint."""
    manifest = CheckpointStore(url, options).latest(run)
    assert manifest is not None and manifest.step == step
    return {f.path: f.sha256 for f in manifest.files if f.path != "journal.jsonl"}
