"""The runs of a sweep as a comparison needs them, read from MLflow by tags, metric names and artifacts alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from conf.schema import Prices
from flows.record import PHASES
from flows.side_records import CALIBRATION_SCALES, EVAL_RESULTS
from infra.mlflow_read import LineOfStep, RunRecord, Series, artifact_lines, with_series
from tasks.numerics.comparison import finite_median

ScaleName = Annotated[str, StringConstraints(pattern=r"^layer [0-9]+ [qkv]$")]

ACCURACY = "eval/accuracy"
MISMATCH = "mismatch/token_mult_prob_error"
ROLLOUT_RATE = "throughput/rollout_tokens_per_s"
TRAIN_RATE = "throughput/train_tokens_per_s"
STEP = "time/step_s"
POSITION = "mismatch/abs_diff_by_position/"
READ = ("eval/accuracy", MISMATCH, "mismatch/gen_kl", "reward/mean", "time/", "throughput/", POSITION)
"""Prefixes of the metrics whose history a comparison reads."""

_SPENT = (STEP, "time/eval_s", "time/checkpoint_s", "time/bootstrap_s", "time/preflight_s", "time/warm_start_s")
_SEED, _AMOUNT = re.compile(r"-?[0-9]{1,18}"), re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class Answers(LineOfStep):
    """1 for a prompt that was solved, 0 for one that was not, by prompt id."""

    values: dict[str, Literal[0, 1]]  # type: ignore[assignment]


class LayerScales(LineOfStep):
    """FP8 scales by `layer N q`, `k`, `v`."""

    values: dict[ScaleName, float]


@dataclass(frozen=True)
class SweepRun:
    """A run with what it logged. `solved`: final answers, 0 or 1 by prompt id; `scales`: by layer and part."""

    record: RunRecord
    recipe: str
    seed: int
    axes: str
    solved: Mapping[str, int]
    scales: Mapping[str, Series]

    @property
    def variant(self) -> str:
        """Recipe and values of the further axes: what is compared."""
        return variant_name(self.recipe, json.loads(self.axes))

    @property
    def accuracy(self) -> Series:
        return self.record.series.get(ACCURACY, ())

    @property
    def last_accuracy(self) -> float | None:
        return self.accuracy[-1][1] if self.accuracy else None

    def values(self, metric: str) -> tuple[float, ...]:
        """A metric over its steps; empty where it was not logged."""
        return tuple(value for _, value in self.record.series.get(metric, ()))

    def median(self, metric: str) -> float | None:
        """Median over steps; NaN where a value was not finite, None where it was not logged."""
        values = self.values(metric)
        if not values:
            return None
        found = finite_median(values)
        return math.nan if found is None else found

    @property
    def spent_s(self) -> float:
        """Measured seconds: steps, evaluations, checkpoints and preparation; not the start of processes."""
        return sum(value for metric in _SPENT for value in self.values(metric) if math.isfinite(value))

    def _held(self, tag: str) -> float | None:
        """How much hardware a tag says; None for no number, since anybody can write a tag."""
        text = self.record.tags.get(tag, "")
        return float(text) if _AMOUNT.fullmatch(text) else None

    def gpu_seconds(self) -> float | None:
        """Measured seconds times the GPUs that the run held; None where it did not say how many."""
        gpus = self._held("gpus")
        return None if gpus is None else self.spent_s * gpus

    def cost_usd(self, prices: Prices) -> float | None:
        """By the price table; None for hardware that it does not have."""
        gpus = self._held("gpus")
        if gpus is None:
            return None
        if gpus:
            device = self.record.tags.get("device", "")
            found = [price for name, price in prices.gpu_hour_usd.items() if name.lower() in device.lower()]
            return self.spent_s / 3600 * gpus * found[0] if found else None
        threads = self._held("cpu_threads")
        if threads is None or prices.cpu_hour_usd is None:
            return None
        return self.spent_s / 3600 * threads * prices.cpu_hour_usd


def variant_name(recipe: str, axes: Mapping[str, Any]) -> str:
    """`fp8_e2e`, or `fp8_e2e, algorithm.kl_coef=0.01` with further axes."""
    return ", ".join((recipe, *(f"{key}={_shown(value)}" for key, value in sorted(axes.items()))))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def describe(record: RunRecord) -> tuple[str, int, str] | None:
    """Recipe, seed and axes (JSON with sorted keys) of a run by its tags, else its parameters; None without."""
    recipe = record.tags.get("recipe") or record.params.get("recipe.name") or record.params.get("recipe")
    seed = record.tags.get("seed") or record.params.get("seed")
    if recipe is None or seed is None or not _SEED.fullmatch(seed):
        return None
    try:
        axes = json.loads(record.tags.get("axes", "{}"))
    except json.JSONDecodeError:
        return None
    if not isinstance(axes, dict):
        return None
    return recipe, int(seed), json.dumps(axes, sort_keys=True)


def newest_of_each(records: Sequence[RunRecord]) -> dict[tuple[str, int, str], RunRecord]:
    """One record for each recipe, seed and axes: the newest that finished, else the newest."""
    chosen: dict[tuple[str, int, str], RunRecord] = {}
    for record in sorted(records, key=lambda r: (r.finished, r.start_ms)):
        key = describe(record)
        if key is not None:
            chosen[key] = record
    return chosen


def load_run(client: Any, record: RunRecord, key: tuple[str, int, str]) -> SweepRun:
    """Histories and artifacts of one run."""
    answers = [line for line in artifact_lines(client, record.run_id, EVAL_RESULTS, Answers) if line.kind == ACCURACY]
    last = max(answers, key=lambda line: line.step, default=None)
    series: dict[str, list[tuple[int, float]]] = {}
    for line in artifact_lines(client, record.run_id, CALIBRATION_SCALES, LayerScales):
        for slot, value in line.values.items():
            series.setdefault(slot, []).append((line.step, value))
    scales = {slot: tuple(sorted(points)) for slot, points in series.items()}
    solved = {} if last is None else {prompt: int(answer) for prompt, answer in last.values.items()}
    return SweepRun(with_series(client, record, READ), *key, solved=solved, scales=scales)


def phase_medians(runs: Sequence[SweepRun]) -> dict[str, float | None]:
    """Median seconds of each phase and of the whole step over all steps of all runs."""
    names = {phase: f"time/{phase}_s" for phase in PHASES} | {"step": STEP}
    return {name: finite_median([v for run in runs for v in run.values(key)]) for name, key in names.items()}


def mismatch_by_position(runs: Sequence[SweepRun]) -> tuple[tuple[str, float], ...]:
    """(FROM-TO, mean abs d over steps and seeds) in the order of positions."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for metric in run.record.series:
            if metric.startswith(POSITION):
                found.setdefault(metric.removeprefix(POSITION), []).extend(run.values(metric))
    return tuple((name, sum(values) / len(values)) for name, values in sorted(found.items()))


def by_variant(runs: Sequence[SweepRun]) -> Iterator[tuple[str, tuple[SweepRun, ...]]]:
    """Runs that finished, grouped in the order of their first start, seeds ascending."""
    groups: dict[str, list[SweepRun]] = {}
    for run in sorted(runs, key=lambda r: r.record.start_ms):
        if run.record.finished:
            groups.setdefault(run.variant, []).append(run)
    for name, members in groups.items():
        yield name, tuple(sorted(members, key=lambda r: r.seed))
