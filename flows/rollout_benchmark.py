"""The flow `rollout-benchmark`: the ladder of rollout precisions as `fp8-grpo benchmark` measures it."""

# Annotations are evaluated here and now: Prefect runs a served flow where their names would not be found.
import json
from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact

from flows.console import outlive_readers
from flows.environment import prepare_environment
from flows.form import LadderName, Override, form_overrides
from flows.hooks import FREEING

_SHOWN = ("mode", "concurrency", "prompt", "response", "tokens_per_s", "speedup", "kv_capacity_tokens", "preemptions")


@flow(name="rollout-benchmark", persist_result=False, validate_parameters=True, **FREEING)
def rollout_benchmark(benchmark: LadderName = "ladder", overrides: Sequence[Override] = ()) -> dict[str, Any]:
    """Rollout throughput of BF16, FP8 linear layers, and FP8 linear layers with an FP8 KV cache; needs vLLM.

    Args:
        benchmark: Loads and rungs (conf/benchmark).
        overrides: Model and memory of the engine, such as `model=qwen3_8b_base`; an override wins over its field.
    """
    outlive_readers()
    prepare_environment(local_ray=False)
    # Imported here: matplotlib and mlflow take seconds.
    from rich.console import Console

    from flows.benchmark import run_benchmark

    folder = run_benchmark(form_overrides({"benchmark": benchmark}, list(overrides)), Console(width=140))
    rows = json.loads((folder / "rollout_ladder.json").read_text())
    shown = [{key: row[key] for key in _SHOWN if key in row} for row in rows]
    create_table_artifact(shown, key="rollout-ladder", description="rollout throughput by precision")
    return {"folder": str(folder), "rows": rows}
