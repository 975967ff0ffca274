"""Starting the command line as a person would, killing it, and reading what it left."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from unittest.mock import patch

import psutil
from mlflow import MlflowClient

from flows.record import MEASURED
from infra.journal import Journal
from infra.prefect_server import EmbeddedPrefectServer
from infra.store import CheckpointStore
from tests.flows import forkserver

FEW_SAMPLES = (
    "steps=6",
    "eval_every=3",
    "checkpoint_every=2",
    "data.eval_prompts=64",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "trainer.micro_batch_size=8",
    "rollout.threads=1",
    "trainer.threads=1",
)
SMALL = (*FEW_SAMPLES, "model.warm_start.steps=25", "data.pool_size=3000")
"""A run that takes seconds and still goes through every phase, with two micro-batches an update.

One thread an engine: runs stand beside each other, and threads that wait for their turn on a core spin.
"""

OWN_PREFECT = {"PREFECT_API_URL": ""}
"""Environment of a command that starts a Prefect server of its own, as it does for a user who names none."""

PROGRAM = (sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main(sys.argv[1:]))")


@dataclass(frozen=True)
class Finished:
    """Exit code and output of a command."""

    code: int
    out: str


def command(arguments: Sequence[str], runs_dir: Path, base: Sequence[str] = SMALL) -> list[str]:
    """The arguments of a training run whose files stay below `runs_dir`."""
    places = [f"runs_dir={runs_dir}", f"storage.url={runs_dir}/checkpoints"]
    return ["train", *base, *places, *arguments]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a command: this one's, with the Prefect server that commands share unless `extra` says otherwise."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL")}
    places = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(places)} | dict(extra or {})
    return clean | own if "PREFECT_API_URL" in own else clean | own | {"PREFECT_API_URL": _shared_prefect()}


@cache
def _shared_prefect() -> str:
    """The API of a server that lasts as long as this process: each command that starts its own takes 7 s of CPU."""
    folder = TemporaryDirectory(prefix="prefect-")
    atexit.register(folder.cleanup)
    database = f"sqlite+aiosqlite:///{folder.name}/prefect.db"
    with patch.dict(os.environ, {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database}):
        server = EmbeddedPrefectServer(Path(folder.name) / "prefect.log")
    server.wait(120)
    return server.url


def train(
    arguments: Sequence[str],
    runs_dir: Path,
    extra: Mapping[str, str] | None = None,
    base: Sequence[str] = SMALL,
) -> Finished:
    """Run to the end. `extra`: variables of its environment."""
    return Finished(*forkserver.run(command(arguments, runs_dir, base), environment(extra), 600))


def train_anew(arguments: Sequence[str], runs_dir: Path, extra: Mapping[str, str] | None = None) -> Finished:
    """As `train` in an interpreter of its own, whose hashes of text are others: for what has to be equal to the bit."""
    done = subprocess.run(
        [*PROGRAM, *command(arguments, runs_dir)],
        env=environment(extra) | {"PYTHONHASHSEED": "12345"},
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


def fp8_grpo(arguments: Sequence[str], extra: Mapping[str, str] | None = None) -> Finished:
    """Any command of `fp8-grpo`, to its end."""
    return Finished(*forkserver.run(arguments, environment(extra), 1200))


def train_and_kill(
    arguments: Sequence[str],
    runs_dir: Path,
    run: str,
    after_step: int,
    extra: Mapping[str, str] | None = None,
    base: Sequence[str] = SMALL,
) -> None:
    """SIGKILL the driver as soon as `after_step` is in the journal, that is inside the step after it."""
    whole = command([*arguments, f"run_name={run}"], runs_dir, base)
    with open(os.devnull, "wb") as out:
        process = forkserver.Command(whole, environment(extra), out.fileno(), new_session=False)
    _await_step(process, runs_dir / run / "journal.jsonl", after_step)
    children = psutil.Process(process.pid).children(recursive=True)
    time.sleep(0.15)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _sweep(children)


def train_and_interrupt(
    arguments: Sequence[str], runs_dir: Path, run: str, after_step: int, extra: Mapping[str, str] | None = None
) -> tuple[Finished, list[str]]:
    """Ctrl-C as a terminal sends it: SIGINT to the whole process group. Also returns what was left running."""
    whole = command([*arguments, f"run_name={run}"], runs_dir)
    with TemporaryFile() as out:
        process = forkserver.Command(whole, environment(extra), out.fileno(), new_session=True)
        _await_step(process, runs_dir / run / "journal.jsonl", after_step)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(timeout=240)
        _, alive = psutil.wait_procs(children, timeout=60)
        out.seek(0)
        said = out.read().decode()
    return Finished(code, said), [" ".join(p.cmdline()) for p in alive]


def _await_step(process: forkserver.Command, journal: Path, step: int) -> None:
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
