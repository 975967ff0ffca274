"""The comparison of a sweep: from its runs in MLflow to figures, intervals, verdicts and corridor checks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from conf.schema import Sweep
from flows.comparison_data import (
    ACCURACY,
    MISMATCH,
    ROLLOUT_RATE,
    STEP,
    TRAIN_RATE,
    SweepRun,
    by_variant,
    describe,
    load_run,
    mismatch_by_position,
    newest_of_each,
    phase_medians,
)
from flows.corridor import PlannedChild, check_corridors
from infra.mlflow_read import MlflowReadError, Series, sweep_runs
from tasks.numerics.comparison import (
    CorridorCheck,
    Interval,
    Judgement,
    Outcome,
    accuracy_interval,
    finite_median,
    judge_accuracy,
    judge_mismatch,
    judge_speed,
    mean_interval,
    overall,
    paired_difference,
    ratio_interval,
    speedup,
)

ROLLOUT_SPEEDUP = "speedup/rollout_vs_bf16"
STEP_SPEEDUP = "speedup/step_vs_bf16"


@dataclass(frozen=True)
class RunFigures:
    """One run of the sweep: speed-ups against the baseline of its seed, what it used, what it cost."""

    run_id: str
    name: str
    variant: str
    seed: int
    status: str
    accuracy_first: float | None
    accuracy_last: float | None
    mismatch_median: float | None
    rollout_speedup: float | None
    step_speedup: float | None
    spent_s: float
    gpu_seconds: float | None
    cost_usd: float | None


@dataclass(frozen=True)
class Curves:
    """Histories by seed, and of the first seed the Q/K/V scales by layer and part."""

    accuracy: Mapping[int, Series]
    reward: Mapping[int, Series]
    mismatch: Mapping[int, Series]
    scales: Mapping[str, Series]


@dataclass(frozen=True)
class VariantSummary:
    """A recipe, at given values of further axes, over its seeds. Times in seconds, rates in tokens/s."""

    variant: str
    recipe: str
    seeds: tuple[int, ...]
    accuracy: Interval | None
    difference: Interval | None
    accuracy_bf16: float | None
    mismatch_medians: tuple[float | None, ...]
    rollout_speedup: Interval | None
    step_speedup: Interval | None
    phases: Mapping[str, float | None]
    rollout_tokens_per_s: float | None
    train_tokens_per_s: float | None
    gpu_seconds: float | None
    cost_usd: float | None
    by_position: tuple[tuple[str, float], ...]
    curves: Curves
    judgements: tuple[Judgement, ...]
    verdict: Outcome


@dataclass(frozen=True)
class Comparison:
    """All that the report shows. `lost`: planned runs that did not finish, with their status in MLflow or `absent`."""

    sweep_id: str
    sweep: str
    baseline: str
    variants: tuple[VariantSummary, ...]
    runs: tuple[RunFigures, ...]
    lost: Mapping[str, str]
    notes: tuple[str, ...]
    corridors: Mapping[str, tuple[CorridorCheck, ...]]

    @property
    def regressions(self) -> tuple[str, ...]:
        """A line for each check of a corridor that failed."""
        return tuple(
            f"{variant}: {check.metric} {corridor_words(check)}"
            for variant, checks in self.corridors.items()
            for check in checks
            if check.failed
        )

    def json(self) -> str:
        """As JSON; numbers that are not finite are null."""
        return json.dumps(_plain(asdict(self)), indent=1)


def compare(
    client: Any, experiment: str, sweep_id: str, settings: Sweep, planned: Sequence[PlannedChild] = ()
) -> Comparison:
    """Read a sweep and compare; `MlflowReadError` where MLflow has no run of it and none was planned."""
    records = sweep_runs(client, experiment, sweep_id)
    if not records and not planned:
        raise MlflowReadError(f"sweep_id = {sweep_id}: experiment {experiment} has no run with this tag")
    unknown = [record.name for record in records if describe(record) is None]
    chosen = newest_of_each(records)
    runs = [load_run(client, record, key) for key, record in chosen.items()]
    groups = dict(by_variant(runs))
    baselines = {(run.axes, run.seed): run for run in runs if run.recipe == settings.baseline and run.record.finished}
    figures = tuple(_figures(run, baselines, settings) for run in sorted(runs, key=lambda r: r.record.start_ms))
    variants = tuple(
        _summary(name, members, baselines, [f for f in figures if f.variant == name], settings)
        for name, members in groups.items()
    )
    notes = [f"run {name} says no recipe, seed and axes and is left out" for name in unknown]
    if not any(variant.recipe == settings.baseline for variant in variants):
        notes.append(f"no finished run of the baseline {settings.baseline}: nothing is compared with it")
    name = next((record.tags["sweep"] for record in records if "sweep" in record.tags), settings.name)
    corridors = check_corridors(client, experiment, sweep_id, name, settings.corridor, runs, planned)
    lost = _lost(runs, planned)
    return Comparison(sweep_id, name, settings.baseline, variants, figures, lost, tuple(notes), corridors)


def corridor_words(check: CorridorCheck) -> str:
    """Value, place and bounds of a check."""
    if check.place == "missing":
        return "is missing or not a number"
    if check.low is None or check.high is None:
        return f"{check.value:.6g}, not enough history ({check.history} earlier sweeps)"
    where = "inside" if check.place == "inside" else check.place
    return f"{check.value:.6g}, {where} [{check.low:.6g}, {check.high:.6g}] of {check.history} earlier sweeps"


def _lost(runs: Sequence[SweepRun], planned: Sequence[PlannedChild]) -> dict[str, str]:
    status = {(run.variant, run.seed): run.record.status for run in runs}
    wanted = {(child.variant, child.seed): child.name for child in planned}
    wanted |= {(run.variant, run.seed): run.record.name for run in runs if (run.variant, run.seed) not in wanted}
    lost = {name: status.get(key, "absent") for key, name in wanted.items()}
    return {name: found for name, found in lost.items() if found != "FINISHED"}


def _figures(run: SweepRun, baselines: Mapping[tuple[str, int], SweepRun], settings: Sweep) -> RunFigures:
    base = baselines.get((run.axes, run.seed)) if run.record.finished else None
    rollout = step = None
    if base is not None:
        rollout = speedup(run.values(ROLLOUT_RATE), base.values(ROLLOUT_RATE), higher_is_faster=True)
        step = speedup(run.values(STEP), base.values(STEP), higher_is_faster=False)
    return RunFigures(
        run.record.run_id,
        run.record.name,
        run.variant,
        run.seed,
        run.record.status,
        run.accuracy[0][1] if run.accuracy else None,
        run.last_accuracy,
        run.median(MISMATCH),
        rollout,
        step,
        run.spent_s,
        run.gpu_seconds(),
        run.cost_usd(settings.prices),
    )


def _summary(
    name: str,
    runs: Sequence[SweepRun],
    baselines: Mapping[tuple[str, int], SweepRun],
    figures: Sequence[RunFigures],
    settings: Sweep,
) -> VariantSummary:
    is_baseline = runs[0].recipe == settings.baseline
    pairs = [(run, baselines[(run.axes, run.seed)]) for run in runs if (run.axes, run.seed) in baselines]
    finished = [figure for figure in figures if figure.status == "FINISHED"]
    confidence = settings.bootstrap.confidence
    rollout = _ratio([figure.rollout_speedup for figure in finished], confidence)
    step = _ratio([figure.step_speedup for figure in finished], confidence)
    difference = None if is_baseline else _difference(pairs, settings)
    mismatches = tuple(run.median(MISMATCH) for run in runs)
    gates = settings.gates
    judgements = [judge_mismatch(mismatches, gates.max_mismatch)]
    if not is_baseline:
        judgements.insert(0, judge_accuracy(difference, gates.max_accuracy_loss))
        judgements.append(judge_speed("rollout", rollout, gates.min_rollout_speedup))
        judgements.append(judge_speed("step", step, gates.min_step_speedup))
    bf16 = [values[-1] for run in runs if (values := run.values("eval/accuracy_bf16"))]
    return VariantSummary(
        name,
        runs[0].recipe,
        tuple(run.seed for run in runs),
        _accuracy(runs, settings),
        difference,
        sum(bf16) / len(bf16) if bf16 else None,
        mismatches,
        None if is_baseline else rollout,
        None if is_baseline else step,
        phase_medians(runs),
        finite_median([value for run in runs for value in run.values(ROLLOUT_RATE)]),
        finite_median([value for run in runs for value in run.values(TRAIN_RATE)]),
        _total([figure.gpu_seconds for figure in finished]),
        _total([figure.cost_usd for figure in finished]),
        mismatch_by_position(runs),
        _curves(runs),
        tuple(judgements),
        overall(judgements),
    )


def _accuracy(runs: Sequence[SweepRun], settings: Sweep) -> Interval | None:
    """From the answers to each prompt where all runs have them to the same prompts, else from totals."""
    prompts = set(runs[0].solved)
    if prompts and all(set(run.solved) == prompts for run in runs):
        order, bootstrap = sorted(prompts), settings.bootstrap
        return accuracy_interval(_answers(runs, order), bootstrap.confidence, bootstrap.resamples)
    totals = [run.last_accuracy for run in runs]
    known = [total for total in totals if total is not None and math.isfinite(total)]
    return mean_interval(known, settings.bootstrap.confidence) if known and len(known) == len(totals) else None


def _difference(pairs: Sequence[tuple[SweepRun, SweepRun]], settings: Sweep) -> Interval | None:
    if not pairs:
        return None
    prompts = set(pairs[0][0].solved)
    both = [run for pair in pairs for run in pair]
    if prompts and all(set(run.solved) == prompts for run in both):
        order, bootstrap = sorted(prompts), settings.bootstrap
        ours, theirs = (_answers([pair[i] for pair in pairs], order) for i in (0, 1))
        return paired_difference(ours, theirs, bootstrap.confidence, bootstrap.resamples)
    totals = [(ours.last_accuracy, theirs.last_accuracy) for ours, theirs in pairs]
    known = [a - b for a, b in totals if a is not None and b is not None and math.isfinite(a - b)]
    return mean_interval(known, settings.bootstrap.confidence) if known else None


def _answers(runs: Sequence[SweepRun], prompts: Sequence[str]) -> list[list[int]]:
    return [[run.solved[prompt] for prompt in prompts] for run in runs]


def _ratio(ratios: Sequence[float | None], confidence: float) -> Interval | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return ratio_interval(known, confidence) if known else None


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _curves(runs: Sequence[SweepRun]) -> Curves:
    def of(metric: str) -> dict[int, Series]:
        return {run.seed: run.record.series[metric] for run in runs if metric in run.record.series}

    return Curves(of(ACCURACY), of("reward/mean"), of(MISMATCH), runs[0].scales)


def write_speedups(client: Any, comparison: Comparison) -> None:
    """Log both speed-ups to each run that has them, at step 0; a value that is there already is not logged again."""
    for figures in comparison.runs:
        found = {ROLLOUT_SPEEDUP: figures.rollout_speedup, STEP_SPEEDUP: figures.step_speedup}
        held = client.get_run(figures.run_id).data.metrics
        for metric, value in found.items():
            if value is not None and held.get(metric) != value:
                client.log_metric(figures.run_id, metric, value, step=0)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
