"""The benchmark's rungs, each measured in a process of its own, and the comparison of what they gave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.schema import Benchmark, Recipe, VllmRollout
from tasks.engines.protocols import EngineError
from tasks.engines.vllm_arguments import engine_environment

RECIPES = {"bf16": "bf16", "fp8_linear": "fp8_rollout", "fp8_linear_kv": "fp8_rollout_kv"}
"""Recipe whose rollout side each rung runs."""

_TAIL = 25
"""Lines of a failed rung's output that are shown."""


def run_rung(
    mode: str,
    model_dir: Path,
    recipe: Recipe,
    rollout: VllmRollout,
    benchmark: Benchmark,
    log: Path,
    only_start: bool = False,
) -> list[dict[str, Any]]:
    """Rows of one rung, or with `only_start` one with its start-up alone; its output goes to `log`.

    `EngineError` with the end of its output when the process fails, and when it outlasts
    `benchmark.mode_timeout_s`: it is killed then, and nothing of it stays.
    """
    with tempfile.TemporaryDirectory(prefix="fp8-grpo-benchmark-") as folder, log.open("wb") as output:
        result = Path(folder) / "rows.json"
        spec = {
            "mode": mode,
            "model_dir": str(model_dir),
            "recipe": recipe.model_dump(mode="json"),
            "rollout": rollout.model_dump(mode="json"),
            "benchmark": benchmark.model_dump(mode="json"),
            "only_start": only_start,
            "result": str(result),
        }
        command = [sys.executable, "-m", "tasks.engines.vllm_benchmark"]
        own = getattr(benchmark.rungs, mode)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | engine_environment(recipe) | own.environment,
        )
        try:
            process.communicate(json.dumps(spec).encode(), timeout=benchmark.mode_timeout_s)
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"benchmark rung {mode}: not done after benchmark.mode_timeout_s = {benchmark.mode_timeout_s:g}; {log}"
            ) from error
        finally:
            _end(process)
        if process.returncode != 0 or not result.is_file():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
            raise EngineError(f"benchmark rung {mode} failed with exit code {process.returncode}; {log}:\n{tail}")
        rows: list[dict[str, Any]] = json.loads(result.read_text())
        return rows


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the rung with all it started; a leftover would hold the device's memory and spoil the next rung."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def compared(rows: Sequence[dict[str, Any]], conditions: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with `speedup` over the bf16 row of the same load (median tokens/s) and the run's `conditions`.

    Below 1 the rung was slower. A load without a bf16 row has no speedup.
    """
    base = {_load(row): statistics.median(row["tokens_per_s"]) for row in rows if row["mode"] == "bf16"}
    result = []
    for row in rows:
        own = statistics.median(row["tokens_per_s"])
        ratio = {"speedup": round(own / base[_load(row)], 4)} if _load(row) in base else {}
        result.append(row | ratio | conditions)
    return result


def _load(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row.get("slope", False), row["prompt"], row["response"], row["concurrency"])


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence for each FP8 rung of the headline load: faster, no difference beyond the spread, or slower."""
    headline = {row["mode"]: row for row in rows if row["headline"]}
    base, sentences = headline["bf16"], []
    for mode, row in headline.items():
        if mode == "bf16":
            continue
        low, high = min(row["tokens_per_s"]), max(row["tokens_per_s"])
        base_low, base_high = min(base["tokens_per_s"]), max(base["tokens_per_s"])
        if low > base_high:
            word = "faster than"
        elif high < base_low:
            word = "slower than"
        else:
            word = "not distinguishable from"
        sentences.append(f"{mode} was {word} bf16: {row['speedup']:.3f}x")
    return sentences
