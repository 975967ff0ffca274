"""Accuracy, mismatch and speed of the recipes on one GPU: a sweep in pieces, each within an allocation.

    python -m tests.gpu.recipes OUT.json FOLDER --sweep-id ID [--sweep NAME] [--allocation SECONDS] [--beside N]
        [KEY=VALUE ...]

One call is one piece; while it ends with 3, the same command goes on. FOLDER holds runs, checkpoints and MLflow's
store, and has to be at the same place each time: with it goes on what was begun, and with its `runs/mlflow.db` and
`runs/mlartifacts` alone finished runs are known and others begin anew. After each piece all rows of the sweep are in
OUT.json, those that were not run among them; the table is printed (see `tests.gpu.recipes_table`).

A small model leaves most of a GPU idle: several calls with a FOLDER of their own, the same ID, other `sweep.seeds` and
`cluster=local` (nobody sleeps) can share it. `--beside` says how many others do: such rows count for accuracy and
mismatch, not for speed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from flows.comparison_data import ACCURACY, MISMATCH, ROLLOUT_RATE, TRAIN_RATE, SweepRun, load_run, newest_of_each
from flows.corridor import PlannedChild
from flows.environment import prepare_environment
from flows.sweep_report import stored_plan
from infra.device import gpu_count
from infra.mlflow_read import open_client, sweep_runs
from infra.provenance import versions
from tests.flows.runs import PROGRAM
from tests.gpu.recipes_table import PHASE_METRICS, Row, load, save, table

EXPERIMENT: Final = "fp8-grpo"

VLLM_ON_A_GPU: Final = (
    # A cache of fixed size: what others hold of the device while an engine starts does not matter.
    "rollout.kv_cache_memory_bytes=4294967296",
    # Graphs of decode steps without torch.compile, so that starts take seconds.
    "rollout.engine_args.compilation_config={mode: 0, cudagraph_mode: FULL_DECODE_ONLY}",
    "rollout.cudagraph_capture_sizes=[1,2,4,8,16,32,64,128,256]",
)
ON_A_GPU: Final = ("cluster=colocated", *VLLM_ON_A_GPU)
ENVIRONMENT: Final = {
    # The block product that needs no compilation for each shape.
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
}
CONDITIONS: Final = (
    "steps",
    "eval_every",
    "seed",
    "algorithm.name",
    "algorithm.prompts_per_step",
    "algorithm.group_size",
    "algorithm.updates_per_step",
    "cluster.share_gpus",
    "rollout.engine",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.batch_size",
    "rollout.kv_cache_memory_bytes",
    "rollout.sleep_level",
    "trainer.engine",
    "trainer.optimizer.learning_rate",
    "data.kind",
    "data.task",
    "data.parameters",
    "data.eval_prompts",
    "model.warm_start.steps",
    "recipe.calibration.refresh",
    "recipe.calibration.max_sequences",
)
"""Parameters of a run that stand beside its figures."""


def run_piece(sweep: str, sweep_id: str, folder: Path, allocation: float | None, overrides: Sequence[str]) -> int:
    """One call of the sweep; its exit code."""
    places = [f"runs_dir={folder}/runs", f"storage.url={folder}/checkpoints", f"tracking.uri={_uri(folder)}"]
    bound = [] if allocation is None else [f"sweep.allocation_s={allocation:g}"]
    chosen = [*places, *(ON_A_GPU if gpu_count() else ()), *bound, *overrides]
    command = [*PROGRAM, "sweep", sweep, *chosen, "--sweep-id", sweep_id]
    return subprocess.run(command, env=ENVIRONMENT | os.environ, check=False).returncode


def _uri(folder: Path) -> str:
    return f"sqlite:///{folder}/runs/mlflow.db"


def collect(folder: Path, sweep_id: str, beside: int) -> list[Row]:
    """A row for each planned run of a sweep, and for each other run that has its tag; `beside` as in `Row`."""
    client = open_client(_uri(folder))
    records = sweep_runs(client, EXPERIMENT, sweep_id)
    found = [load_run(client, record, key) for key, record in newest_of_each(records).items()]
    rows = {(run.variant, run.seed): _row(run, sweep_id, beside) for run in found}
    plan = stored_plan(client, EXPERIMENT, sweep_id)
    planned = () if plan is None else plan[1]
    model = next((row.model for row in rows.values()), "unknown")
    missing = {(child.variant, child.seed): _absent(child, sweep_id, model) for child in planned}
    return list({**missing, **rows}.values())


def _absent(child: PlannedChild, sweep_id: str, model: str) -> Row:
    return Row(model, sweep_id, child.variant, "unknown", "unknown", child.seed, "absent")


def _row(run: SweepRun, sweep_id: str, beside: int) -> Row:
    params, latest = run.record.params, run.record.latest
    prompts = sorted(run.solved)
    medians = {name: statistics.median(found) for name, key in PHASE_METRICS.items() if (found := run.values(key))}
    return Row(
        model=params.get("model.name", "unknown"),
        sweep_id=sweep_id,
        recipe=run.variant,
        precision=params.get("recipe.name", "unknown"),
        correction=params.get("correction.name", "unknown"),
        seed=run.seed,
        status=run.record.status,
        accuracy=tuple(run.record.series.get(ACCURACY, ())),
        accuracy_bf16=latest.get("eval/accuracy_bf16"),
        answers="".join(str(run.solved[prompt]) for prompt in prompts),
        prompts=hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16] if prompts else "",
        mismatch={"token_mult_prob_error": run.values(MISMATCH), "gen_kl": run.values("mismatch/gen_kl")},
        phases=medians,
        rollout_tokens_per_s=run.median(ROLLOUT_RATE),
        train_tokens_per_s=run.median(TRAIN_RATE),
        memory={key: value for key, value in latest.items() if key.startswith("memory/")},
        beside=beside,
        conditions=_conditions(run),
    )


def _conditions(run: SweepRun) -> dict[str, Any]:
    tags = run.record.tags
    chosen = {key: run.record.params[key] for key in CONDITIONS if key in run.record.params}
    machine = {key: tags.get(key) for key in ("device", "gpus", "cpu_threads", "git_commit")}
    date = f"{datetime.fromtimestamp(run.record.start_ms / 1000, UTC):%Y-%m-%d}"
    return machine | {"date": date, "versions": versions()} | chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """One piece, the rows and the table; the sweep's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sweep-id", required=True)
    parser.add_argument("--sweep", default="recipes_h200", help="option of the group sweep (default: %(default)s)")
    parser.add_argument("--allocation", type=float, help="seconds that this call may take")
    parser.add_argument("--beside", type=int, default=0, help="other calls that use the GPU meanwhile")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    chosen = parser.parse_intermixed_args(arguments)
    if chosen.beside < 0:
        parser.error(f"--beside {chosen.beside}: allowed: 0 or more")
    prepare_environment(local_ray=False)
    folder = chosen.folder.absolute()
    code = run_piece(chosen.sweep, chosen.sweep_id, folder, chosen.allocation, chosen.overrides)
    if code == 2:
        return code
    save(chosen.out, collect(folder, chosen.sweep_id, chosen.beside))
    print(table([row for row in load(chosen.out) if row.sweep_id == chosen.sweep_id]))
    return code


if __name__ == "__main__":
    sys.exit(main())
