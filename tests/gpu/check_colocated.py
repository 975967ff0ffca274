"""vLLM and Megatron on one GPU: whole runs with `cluster=colocated`, their continuation, a deadline, the warm start.

    python -m tests.gpu.check_colocated [OUT.json] [PART ...]

Each run is a process of its own. Prints one line for each finding and exits with 1 if any does not hold. Without a GPU
the same runs are made on CPU, where nothing is shared and nobody sleeps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from infra.device import device_facts
from infra.journal import Journal
from infra.provenance import versions
from tests.flows.runs import PROGRAM
from tests.gpu.check_megatron import Finding, finding
from tests.gpu.megatron_bench import write

GPU: Final = torch.cuda.is_available()
RECIPES: Final = ("bf16", "fp8_e2e_kv") if GPU else ("fp8_rollout_kv",)
ENGINES: Final = ("cluster=colocated", "rollout=vllm", "trainer=megatron") + (
    ("rollout.gpu_memory_utilization=0.5", "rollout.kv_cache_memory_bytes=null", "model=qwen3_small")
    if GPU
    else ("trainer.device=cpu", "model.warm_start.steps=25", "trainer.threads=1", "rollout.threads=1")
)
SHORT: Final = ("eval_every=2", "checkpoint_every=2", "data.eval_prompts=64", "algorithm.prompts_per_step=8")
PHASES: Final = ("sync", "sleep", "rollout", "score", "train", "calibrate", "step")
BOUND_S: Final = 60.0
TAIL: Final = 8000
"""Signs of the output of a run that failed which go to the file."""


def _train(work: Path, *overrides: str) -> tuple[int, str, float]:
    """Exit code, output and seconds of a run whose files stay below `work`."""
    places = [f"runs_dir={work}", f"storage.url={work}/checkpoints"]
    start = time.perf_counter()
    command = [*PROGRAM, "train", *ENGINES, *SHORT, *places, *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout, time.perf_counter() - start


def _used() -> int:
    """Memory in use on all GPUs (MiB), by whomever; 0 without one."""
    if not GPU:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def _comes_back(before: int) -> bool:
    """Whether what was in use before is in use again, within 100 MiB and `BOUND_S`."""
    deadline = time.monotonic() + BOUND_S
    while _used() > before + 100 and time.monotonic() < deadline:
        time.sleep(1.0)
    return _used() <= before + 100


def _phases(journal: Journal) -> dict[str, float]:
    steps = [entry.values for entry in journal.entries() if entry.kind == "step"]
    return {
        phase: round(median(values), 3)
        for phase in PHASES
        if (values := [step[f"time/{phase}_s"] for step in steps if f"time/{phase}_s" in step])
    }


def runs(work: Path) -> list[Finding]:
    """Each recipe for 4 steps, with the pre-flight, evaluations and the last one in BF16; then 2 more after a stop."""
    found = []
    for recipe in RECIPES:
        before = _used()
        code, out, seconds = _train(work, f"recipe={recipe}", f"run_name={recipe}", "steps=4")
        journal = Journal(work / recipe / "journal.jsonl")
        final = journal.find("final", 4)
        figures = {"seconds": round(seconds, 1), "median_s": _phases(journal), "tail": "" if final else out[-TAIL:]}
        found.append(finding(f"{recipe}: runs to the end", code == 0 and final is not None, **figures))
        found.append(finding(f"{recipe}: gives the memory back", _comes_back(before), before=before, after=_used()))
        code, out, seconds = _train(work, f"recipe={recipe}", f"resume={recipe}", "steps=6")
        last = Journal(work / recipe / "journal.jsonl").find("final", 6)
        tail = "" if last else out[-TAIL:]
        found.append(
            finding(f"{recipe}: goes on", code == 0 and last is not None, seconds=round(seconds, 1), tail=tail)
        )
    return found


def late(work: Path) -> list[Finding]:
    """A trainer that is late ends the run, and nothing of it stays on the GPU."""
    before = _used()
    code, out, _ = _train(work, f"recipe={RECIPES[0]}", "steps=1", "deadlines.train_s=0.001")
    said = "LateError: train: the trainer: no answer within deadlines.train_s = 0.001 s" in out
    tail = "" if said else out[-TAIL:]
    return [
        finding("a late trainer ends the run with 5", code == 5 and said, code=code, tail=tail),
        finding("nothing of it stays", _comes_back(before), before=before, after=_used()),
    ]


def warm_start(work: Path) -> list[Finding]:
    """Made twice, each in a run of its own: the same bits under the same key."""
    made, seconds = [], []
    for name in ("a", "b"):
        # The run is stopped by its first checkpoint: only what comes before is wanted.
        _, out, _ = _train(work / name, f"recipe={RECIPES[0]}", "steps=1", "deadlines.checkpoint_s=0.001")
        folders = sorted((work / name / "cache" / "warm_start").glob("*/sha256.json"))
        made.append({path.parent.name: json.loads(path.read_text()) for path in folders} or {"none": out[-TAIL:]})
        seconds.append(next((line for line in out.splitlines() if line.startswith("warm start: in")), ""))
    same = made[0] == made[1] and "none" not in made[0]
    return [finding("two warm starts are bitwise one", same, said=seconds, made=[] if same else made)]


PARTS: Final[dict[str, Callable[[Path], list[Finding]]]] = {"warm_start": warm_start, "runs": runs, "late": late}


def main(arguments: list[str]) -> int:
    wanted = [a for a in arguments if a in PARTS] or list(PARTS)
    outs = [a for a in arguments if a.endswith(".json")]
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            results[name] = PARTS[name](Path(folder) / name)
            if outs:
                machine = replace(device_facts(), free_gb=0.0)
                write(Path(outs[0]), {"device": vars(machine), "versions": versions(), "findings": results})
    return 0 if all(row["holds"] for rows in results.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
