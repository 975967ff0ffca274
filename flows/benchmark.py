"""`fp8-grpo benchmark`: the ladder of rollout precisions, printed, stored and drawn."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console as RichConsole
from rich.table import Table

from conf.compose import compose, flatten
from conf.preflight import preflight
from conf.problems import ConfigError
from conf.schema import Benchmark, Recipe, RunConfig, VllmRollout
from conf.schema.vllm import vllm_problems
from flows.environment import tracking_uri
from infra.device import device_facts
from infra.journal import Entry
from infra.mlflow_run import RunSpec, TrackedRun
from infra.provenance import versions
from infra.store_files import absolute_url
from tasks.benchmark import RECIPES, compared, run_rung, verdict
from tasks.engines.tiny_model import model_class, tiny_config
from tasks.kernels import compiled_kernels

_COLUMNS = ("mode", "load", "tokens/s", "speedup", "KV capacity", "preemptions", "start (first), s")


def run_benchmark(overrides: Sequence[str], console: RichConsole) -> Path:
    """Measure all rungs under `overrides`; returns the folder with `rollout_ladder.json` and `rollout_ladder.png`."""
    config = compose(["rollout=vllm", *overrides])
    if not isinstance(config.rollout, VllmRollout):
        raise ConfigError([f"rollout.engine = {config.rollout.engine}: is not measured; allowed: vllm"])
    preflight(config, data=False, trains=False)
    rungs = [(mode, *_rung(config.rollout, config.benchmark, mode)) for mode in config.benchmark.modes]
    folder = Path(config.runs_dir).resolve() / "benchmarks" / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    model_dir = _model_folder(config, folder)
    rows: list[dict[str, Any]] = []
    with compiled_kernels(config, absolute_url(config.storage.url)):
        for mode, recipe, rollout in rungs:
            console.print(f"{mode}: starting", markup=False)
            what = (mode, model_dir, recipe, rollout, config.benchmark)
            cold = {}
            if config.benchmark.warm_up:
                (started,) = run_rung(*what, folder / f"{mode}.start.log", only_start=True)
                cold = {"first_start_s": started["start_s"]}
            found = [row | cold for row in run_rung(*what, folder / f"{mode}.log")]
            rows = compared([*rows, *found], _conditions(config))
            # After each rung: a later one may fail, or the machine be taken away.
            (folder / "rollout_ladder.json").write_text(json.dumps(rows, indent=1))
            console.print(f"{mode}: {', '.join(str(t) for t in found[0]['tokens_per_s'])} tokens/s", markup=False)
    _draw(rows, folder / "rollout_ladder.png")
    console.print(_table(rows, config.model.name))
    for sentence in verdict(rows):
        console.print(sentence, markup=False)
    _track(config, rows, folder)
    return folder


def _rung(rollout: VllmRollout, benchmark: Benchmark, mode: str) -> tuple[Recipe, VllmRollout]:
    """Recipe and settings of a rung; `ConfigError` where they contradict each other."""
    recipe, own = compose([f"recipe={RECIPES[mode]}"]).recipe, getattr(benchmark.rungs, mode)
    merged = rollout.model_copy(
        update={
            "attention_backend": own.attention_backend or rollout.attention_backend,
            "engine_args": rollout.engine_args | own.engine_args,
        }
    )
    problems = vllm_problems(merged, recipe)
    if problems:
        raise ConfigError([f"benchmark.rungs.{mode}: {problem}" for problem in problems])
    return recipe, merged


def _model_folder(config: RunConfig, folder: Path) -> Path:
    """The model's own folder, or one with nothing but the shape: weights are random either way."""
    if config.model.path is not None:
        return Path(config.model.path).resolve()
    assert config.model.architecture is not None
    made = folder / "shape"
    tiny_config(config.model.architecture, eos_token_id=1).save_pretrained(made)
    written = json.loads((made / "config.json").read_text())
    classes = {"architectures": [model_class(config.model.architecture).__name__]}
    (made / "config.json").write_text(json.dumps(written | classes, indent=1))
    return made


def _conditions(config: RunConfig) -> dict[str, Any]:
    """Everything that belongs beside a figure."""
    assert isinstance(config.rollout, VllmRollout)
    settings = config.rollout
    return {
        "model": config.model.name,
        "memory_share": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "backend": settings.attention_backend or "chosen by vLLM",
        "engine_args": dict(settings.engine_args),
        "rungs": config.benchmark.rungs.model_dump(mode="json"),
        "gpu": device_facts().name,
        "versions": versions(),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    rate = statistics.median(row["tokens_per_s"])
    load = f"{row['concurrency']} x ({row['prompt']} + {row['response']})"
    if row.get("slope"):
        load += f", decode step {row['decode_step_s'] * 1e3:.2f} ms"
    return (
        row["mode"],
        load,
        f"{rate:,.0f}",
        f"{row['speedup']:.3f}" if "speedup" in row else "-",
        f"{row['kv_capacity_tokens']:,}",
        f"{row['preemptions']:g}",
        f"{row['start_s']:.1f} ({row['first_start_s']:.1f})" if "first_start_s" in row else f"{row['start_s']:.1f}",
    )


def _table(rows: Sequence[dict[str, Any]], model: str) -> Table:
    table = Table(title=f"rollout throughput, {model}, {rows[0]['gpu']}", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("mode", "load") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of the headline load and, with further loads, speedup over response length."""
    headline = [row for row in rows if row["headline"]]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar([r["mode"] for r in headline], [statistics.median(r["tokens_per_s"]) for r in headline], color="#4472c4")
    left.set(title=_cells(headline[0])[1], ylabel="tokens/s")
    # Whole loads and decode steps at few sequences are different measurements: no line joins them.
    for mode, slope in dict.fromkeys((r["mode"], r.get("slope", False)) for r in rows):
        of_kind = [r for r in rows if (r["mode"], r.get("slope", False)) == (mode, slope) and "speedup" in r]
        found = sorted((r["prompt"] + r["response"], r["speedup"]) for r in of_kind)
        label, line = (f"{mode}, decode step", "--") if slope else (mode, "-")
        right.plot([x for x, _ in found], [y for _, y in found], line, marker="o", label=label)
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set(title="speedup over BF16", xlabel="prompt + response, tokens")
    right.legend()
    figure.savefig(path, dpi=110)


def _track(config: RunConfig, rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """One MLflow run a rung, comparable in the UI like training runs."""
    uri = tracking_uri(config.tracking.uri, Path(config.runs_dir))
    for row in (r for r in rows if r["headline"]):
        name, tags = f"benchmark-{folder.name}-{row['mode']}", {"recipe": row["mode"]}
        run = TrackedRun.open(RunSpec(uri, config.tracking.experiment, name, flatten(config), tags), name, None)
        values = {
            "throughput/rollout_tokens_per_s": statistics.median(row["tokens_per_s"]),
            "speedup/rollout_vs_bf16": row["speedup"],
            "memory/kv_capacity_tokens": row["kv_capacity_tokens"],
            "rollout/preemptions": row["preemptions"],
            "time/engine_start_s": row["start_s"],
        }
        run.log_entry(Entry(1, "benchmark", 0, values, int(time.time() * 1000)))
        for file in ("rollout_ladder.json", "rollout_ladder.png"):
            run.log_artifact(folder / file, None)
        run.finish("FINISHED")
