"""What a whole GRPO step costs at the width of an 8B model on one GPU, by phase.

    python -m tests.gpu.full_step OUT.json [--layers 12] [--steps 4] [KEY=VALUE ...]

The command `fp8-grpo train` itself: vLLM and Megatron share the GPU, layers of the Qwen3-8B shape with random weights,
random prompts and rewards. Rows go to OUT.json, the table is printed. `--layers` and overrides make it smaller.
`--cpu` rehearses it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from flows.record import PHASES
from infra.device import device_name
from infra.journal import Entry, Journal
from infra.provenance import versions
from tests.flows.runs import PROGRAM

RECIPES: Final = ("fp8_e2e_kv",)
LIMIT: Final = 0.02
"""Share of a step that calibration and sync may take."""

COMMON: Final = ("data=synthetic", "checkpoint_every=null", "data.eval_prompts=64")
ON_GPU: Final = (
    "model=qwen3_8b_base",
    "cluster=colocated",
    "cluster.sync_buffer_mb=1024",
    "rollout=vllm",
    "rollout.gpu_memory_utilization=0.4",
    "rollout.kv_cache_memory_bytes=null",
    "rollout.sleep_level=2",
    "rollout.max_new_tokens=1024",
    "rollout.max_model_len=2048",
    "rollout.kv_preflight.enabled=false",
    "trainer=megatron",
    "trainer.offload=true",
    "trainer.recompute=full",
    "trainer.optimizer.state=bf16",
    "algorithm.prompts_per_step=64",
    "algorithm.group_size=8",
    "data.prompt_digits=512",
)
ON_CPU: Final = (
    "model=tiny_qwen3",
    "model.warm_start=null",
    "data.prompt_digits=24",
    "data.pool_size=400",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "trainer.micro_batch_size=8",
)
"""A rehearsal of this program; its figures say nothing."""


def run(recipe: str, folder: Path, layers: int, steps: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train once and return the row; raises `CalledProcessError` when the command fails."""
    chosen = [f"recipe={recipe}", *overrides, f"model.architecture.num_hidden_layers={layers}", f"steps={steps}"]
    chosen += [f"eval_every={steps}", f"runs_dir={folder}", f"storage.url={folder}/checkpoints", f"run_name={recipe}"]
    plan = _command(["train", "--dry-run", *chosen], capture=True)
    _command(["train", *chosen])
    with Journal(folder / recipe / "journal.jsonl") as journal:
        measured = [entry for entry in journal.entries() if entry.kind == "step"]
    return {
        "recipe": recipe,
        "layers": layers,
        "overrides": list(overrides),
        "plan": [line for line in plan.splitlines() if line.startswith("  ") and "memory" in line],
        "steps": [_figures(entry) for entry in measured],
        "device": device_name(),
        "versions": versions(),
    }


def _command(arguments: list[str], capture: bool = False) -> str:
    output = subprocess.PIPE if capture else None
    done = subprocess.run([*PROGRAM, *arguments], check=True, text=True, stdout=output)
    return done.stdout or ""


def _figures(entry: Entry) -> dict[str, float]:
    wanted = ("time/", "throughput/", "memory/", "rollout/", "mismatch/token_mult_prob_error", "mismatch/gen_kl")
    return {"step": float(entry.step)} | {k: float(v) for k, v in entry.values.items() if k.startswith(wanted)}


def median(row: dict[str, Any], key: str) -> float:
    """Over the steps but the first, whose kernels compile."""
    values = [step.get(key, 0.0) for step in row["steps"] if step["step"] > 1]
    return statistics.median(values)


def share(row: dict[str, Any]) -> float:
    """Median share of calibration and sync in a step."""
    shares = [
        (step["time/calibrate_s"] + step["time/sync_s"]) / step["time/step_s"]
        for step in row["steps"]
        if step["step"] > 1
    ]
    return statistics.median(shares)


def table(rows: list[dict[str, Any]]) -> str:
    """Medians of a step by phase, in seconds, and the share of calibration and sync."""
    phases = [*PHASES, "sleep"]
    head = ["recipe", "step", *phases, "calibration + sync", "rollout tokens/s"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in rows:
        seconds = [f"{median(row, f'time/{phase}_s'):.3f}" for phase in phases]
        cells = [row["recipe"], f"{median(row, 'time/step_s'):.2f}", *seconds, f"{share(row):.2%}"]
        cells.append(f"{median(row, 'throughput/rollout_tokens_per_s'):,.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Exit code 1 when calibration and sync take more of a step than `LIMIT`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--cpu", action="store_true", help="a rehearsal without a GPU")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    chosen = parser.parse_intermixed_args()
    if chosen.steps < 2:
        parser.error(f"--steps {chosen.steps}: the first step is not counted; allowed: 2 or more")
    overrides = (*COMMON, *(ON_CPU if chosen.cpu else ON_GPU), *chosen.overrides)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="full-step-") as folder:
        for recipe in chosen.recipes:
            rows.append(run(recipe, Path(folder), chosen.layers, chosen.steps, overrides))
            chosen.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    worst = max(share(row) for row in rows)
    print(f"calibration + sync: {worst:.2%} of a step, limit {LIMIT:.0%}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
