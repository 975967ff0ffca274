"""Sweeps whose runs share a process: each run is the one that a process of its own would have had, to the bit.

Also where a run before it failed, and where the sweep is cut into several allocations.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from conf.compose import compose
from flows.corridor import PlannedChild
from flows.record import MEASURED
from flows.sweep_children import ChildError, ChildLateError
from flows.sweep_plan import Child, plan_sweep
from flows.sweep_shared import SharedRuns
from infra.store import CheckpointStore
from tests.flows.runs import PROGRAM, Finished, fp8_grpo, points, succeeded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

REFUSED = '["recipe=fp8_rollout_kv", "rollout.kv_preflight.warn=1e-9", "rollout.kv_preflight.refuse=1e-9"]'
ROWS = (
    "sweep.recipes=[bf16,refused,fp8_rollout_kv,fp8_e2e_kv]",
    "sweep.seeds=[0]",
    f"sweep.variants={{refused: {REFUSED}}}",
    "sweep.children=shared",
    "data.eval_prompts=32",
    "steps=2",
)
STEPS = 2


def _overrides(folder: Path, *more: str) -> list[str]:
    return [*ROWS, f"runs_dir={folder}/runs", f"storage.url={folder}/checkpoints", *more]


def _sweep(folder: Path, *more: str) -> Finished:
    return fp8_grpo(["sweep", "smoke", *_overrides(folder, *more), "--sweep-id", "s"])


def _with_the_cache_of(folder: Path, other: Path) -> None:
    """Its warm start."""
    (other / "runs").mkdir()
    (other / "runs" / "cache").symlink_to(folder / "runs" / "cache")


def _weights(folder: Path, run: str) -> dict[str, str]:
    """SHA-256 of weights, optimiser and state at the end."""
    manifest = CheckpointStore(f"{folder}/checkpoints").latest(run)
    assert manifest is not None and manifest.step == STEPS
    return {f.path: f.sha256 for f in manifest.files if not f.path.endswith(".jsonl")}


def _journal(folder: Path, run: str) -> dict[tuple[str, int], dict[str, Any]]:
    """All that is no measurement of the machine, by kind and step."""
    lines = map(json.loads, (folder / "runs" / run / "journal.jsonl").read_text().splitlines())
    found = {
        (line["kind"], line["step"]): {k: v for k, v in line["values"].items() if not k.startswith(MEASURED)}
        for line in lines
    }
    # Where an allocation ended there is one more checkpoint.
    return {key: values for key, values in found.items() if key[0] != "checkpoint"}


def _points(folder: Path, run: str) -> dict[tuple[str, int], list[float]]:
    """Those that the run logged itself."""
    return {key: found for key, found in points(folder / "runs", run).items() if not key[0].startswith("speedup/")}


def _assert_same(ours: Path, theirs: Path, run: str) -> None:
    assert _weights(ours, run) == _weights(theirs, run)
    assert _journal(ours, run) == _journal(theirs, run)
    assert _points(ours, run) == _points(theirs, run)
    for name in ("eval_results.jsonl", "calibration_scales.jsonl", "top_tokens.jsonl"):
        files = [folder / "runs" / run / name for folder in (ours, theirs)]
        assert [file.is_file() for file in files] in ([True, True], [False, False])
        assert not files[0].is_file() or files[0].read_bytes() == files[1].read_bytes(), name


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One run in BF16, one that the pre-flight refuses, and two of the format of that."""
    folder = tmp_path_factory.mktemp("shared")
    return folder, _sweep(folder)


def test_a_failed_run_costs_no_other(shared: tuple[Path, Finished]) -> None:
    folder, done = shared
    assert done.code == 1, done.out
    ended = [line.partition("/4 ")[2].split(":")[:2] for line in done.out.splitlines() if "/4 " in line]
    assert [(name, text.strip()) for name, text in ended] == [
        ("s-bf16-s0", "done"),
        ("s-refused-s0", "failed"),
        ("s-fp8_rollout_kv-s0", "done"),
        ("s-fp8_e2e_kv-s0", "done"),
    ]
    assert "run s-refused-s0: exit code 2" in done.out
    # All in one process: nothing ended it.
    logs = folder / "runs" / "sweeps" / "s" / "logs"
    assert (logs / "shared.log").read_text() == ""
    assert "rollout.kv_preflight.refuse" in (logs / "s-refused-s0.log").read_text()


def test_a_run_on_kept_engines_is_the_run_on_fresh_ones(shared: tuple[Path, Finished], tmp_path: Path) -> None:
    """Its own engine served a run before it, which another trainer had trained; the BF16 one three."""
    folder, run = shared[0], "s-fp8_e2e_kv-s0"
    _with_the_cache_of(folder, tmp_path)
    _, children = plan_sweep("smoke", _overrides(tmp_path), "s", None)
    alone = next(child for child in children if child.name == run)
    succeeded(fp8_grpo(["train", *alone.overrides]))
    _assert_same(folder, tmp_path, run)


def test_a_sweep_cut_into_allocations_is_the_uncut_one(shared: tuple[Path, Finished], tmp_path: Path) -> None:
    """Each call does one step of each run: its allocation is used up as soon as it began."""
    folder, runs = shared[0], tmp_path / "runs"
    _with_the_cache_of(folder, tmp_path)
    cut = ("sweep.recipes=[bf16,fp8_rollout_kv]", "allocation_s=1")
    done = _sweep(tmp_path, *cut)
    assert done.code == 3 and "2 runs not finished; this goes on: fp8-grpo sweep smoke" in done.out, done.out
    assert "--sweep-id s" in done.out and (runs / "sweeps" / "s" / "report.html").is_file()
    # Of one run nothing travels but its record in MLflow.
    shutil.rmtree(runs / "s-fp8_rollout_kv-s0")
    shutil.rmtree(tmp_path / "checkpoints" / "s-fp8_rollout_kv-s0")
    done = _sweep(tmp_path, *cut)
    assert done.code == 3 and "2 runs not finished" in done.out, done.out
    done = _sweep(tmp_path, *cut)
    assert done.code == 3 and "1 run not finished" in done.out, done.out
    done = _sweep(tmp_path, *cut)
    assert done.code == 0 and "2 runs, 1 of them done before" in done.out, done.out
    logs = {
        name: (runs / "sweeps" / "s" / "logs" / f"s-{name}-s0.log").read_text() for name in ("bf16", "fp8_rollout_kv")
    }
    # bf16: steps 1 and 2, then its end. The other began twice.
    assert [logs["bf16"].count(f"continues after step {step}") for step in (0, 1, 2)] == [0, 1, 1]
    assert [logs["fp8_rollout_kv"].count(f"continues after step {step}") for step in (0, 1, 2)] == [0, 1, 1]
    assert (logs["bf16"].count("a new run"), logs["fp8_rollout_kv"].count("a new run")) == (1, 2)
    for run in ("s-bf16-s0", "s-fp8_rollout_kv-s0"):
        _assert_same(folder, tmp_path, run)


def test_a_process_that_dies_is_followed_by_another(tmp_path: Path) -> None:
    log, runs = tmp_path / "run.log", SharedRuns("owner", 2, tmp_path / "shared.log", None)
    refused = Child(PlannedChild("r", "bf16", 0, ""), "bf16", ("recipe=bf16", "stepz=3"), compose(()))
    before = set(psutil.Process().children())
    for _ in range(2):
        with pytest.raises(ChildError, match=r"r: exit code 2: .*stepz = 3.*; see .*run\.log"):
            runs.run(refused, log, 120.0)
        (process,) = set(psutil.Process().children()) - before
    # The second time it was the same one: there is no other. Its end while it is idle costs no run.
    process.kill()
    process.wait(30.0)
    with pytest.raises(ChildError, match="exit code 2"):
        runs.run(refused, log, 120.0)
    (successor,) = set(psutil.Process().children()) - before
    assert successor.pid != process.pid
    with pytest.raises(ChildLateError, match=r"not done within sweep\.child_timeout_s=0\.001"):
        runs.run(refused, log, 0.001)
    assert set(psutil.Process().children()) <= before
    runs.close()


def test_ctrl_c_ends_all_of_it(shared: tuple[Path, Finished], tmp_path: Path) -> None:
    folder, _ = shared
    _with_the_cache_of(folder, tmp_path)
    arguments = ["sweep", "smoke", *_overrides(tmp_path, "steps=1000"), "--sweep-id", "s"]
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    journal, deadline = tmp_path / "runs" / "s-bf16-s0" / "journal.jsonl", time.monotonic() + 300
    while not (journal.is_file() and '"kind":"step"' in journal.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 130 and "--sweep-id" in out, out
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
