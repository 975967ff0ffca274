"""Runs recipes x seeds of the main job one after another and prints the table of the README.

    python -m tests.benchmarks.recipe_table --seeds 0 1 2 [--out FOLDER] [KEY=VALUE ...]

Each run is the command `fp8-grpo train` in a process of its own. Wall time includes everything from the
command's start to its end; memory is the largest sum of the resident sets of all its processes (shared
pages counted once per process, so an upper bound), sampled four times a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from flows.report import summarize
from infra.journal import Journal
from infra.provenance import versions

RECIPES = ("bf16", "fp8_rollout", "fp8_rollout_kv", "fp8_e2e", "fp8_e2e_kv")


@dataclass(frozen=True)
class Row:
    """One run. Accuracies are shares of the eval prompts; times in seconds; memory in GB (1e9 bytes)."""

    recipe: str
    seed: int
    accuracy_first: float
    accuracy_last: float
    accuracy_bf16: float
    mismatch_median: float
    mismatch_max: float
    gen_kl_median: float
    step_s: float
    wall_s: float
    peak_gb: float


def _resident_gb(process: psutil.Process) -> float:
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e9


def run(recipe: str, seed: int, out: Path, overrides: list[str]) -> Row:
    """Train once; raises `CalledProcessError` when the command fails."""
    name = f"{recipe}-s{seed}"
    command = [sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main(sys.argv[1:]))", "train"]
    command += [f"recipe={recipe}", f"seed={seed}", f"run_name={name}", f"runs_dir={out}"]
    command += [f"storage.url={out}/checkpoints", *overrides]
    start, peak = time.monotonic(), 0.0
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, _resident_gb(watched))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.25)
    wall = time.monotonic() - start
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return _row(recipe, seed, out / name / "journal.jsonl", wall, peak)


def _row(recipe: str, seed: int, path: Path, wall: float, peak: float) -> Row:
    with Journal(path) as journal:
        summary = summarize(journal)
        kl = [e.values["mismatch/gen_kl"] for e in journal.entries() if e.kind == "step"]
    figures = {k: float(v) for k, v in summary.items() if v is not None}
    return Row(
        recipe=recipe,
        seed=seed,
        accuracy_first=figures["accuracy_first"],
        accuracy_last=figures["accuracy_last"],
        accuracy_bf16=figures["accuracy_bf16"],
        mismatch_median=figures["mismatch_median"],
        mismatch_max=figures["mismatch_max"],
        gen_kl_median=statistics.median(float(value) for value in kl if value is not None),
        step_s=figures["time/step_s"],
        wall_s=wall,
        peak_gb=peak,
    )


def table(rows: list[Row]) -> str:
    """Markdown: one line a recipe, seeds side by side."""
    lines = [
        "| recipe | accuracy, step 0 | accuracy, end | smallest gain | mismatch, median | mismatch, max "
        "| gen_kl, median | step, median s | wall s | peak GB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for recipe in dict.fromkeys(row.recipe for row in rows):
        of = [row for row in rows if row.recipe == recipe]
        first = " / ".join(f"{row.accuracy_first:.3f}" for row in of)
        last = " / ".join(f"{row.accuracy_last:.3f}" for row in of)
        gain = min(row.accuracy_last - row.accuracy_first for row in of)
        mismatch = " / ".join(f"{row.mismatch_median:.5f}" for row in of)
        lines.append(
            f"| `{recipe}` | {first} | {last} | {gain:+.3f} | {mismatch} | {max(r.mismatch_max for r in of):.4f} "
            f"| {statistics.median(r.gen_kl_median for r in of):.2e} | {statistics.median(r.step_s for r in of):.2f} "
            f"| {max(r.wall_s for r in of):.0f} | {max(r.peak_gb for r in of):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run, print rows as they come, then the table; rows are kept in `rows.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--out", type=Path, default=Path("runs") / "recipe_table")
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_args()
    out = parsed.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in parsed.seeds:
        for recipe in parsed.recipes:
            rows.append(run(recipe, seed, out, parsed.overrides))
            print(json.dumps(asdict(rows[-1])), flush=True)
            (out / "rows.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    rows.sort(key=lambda row: (RECIPES.index(row.recipe), row.seed))
    print(table(rows))
    print(", ".join(f"{name} {version}" for name, version in versions().items()))


if __name__ == "__main__":
    main()
