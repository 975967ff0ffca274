"""The regression corridor of a sweep: each variant against earlier sweeps of the same name, set-up and hardware."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import Corridor, Tolerance
from flows.comparison_data import SweepRun, describe, newest_of_each, variant_name
from infra.mlflow_read import SWEEP_ID, RunRecord, runs_of_sweeps_named, with_series
from tasks.numerics.comparison import CorridorCheck, corridor, finite_median

CONFIG_DIGEST = "config_digest"
"""Tag of a run of a sweep: digest of its configuration, so that only equal set-ups are compared over time."""


@dataclass(frozen=True)
class PlannedChild:
    """A run that the sweep meant to have: its name, what it is, and the digest of its configuration."""

    name: str
    variant: str
    seed: int
    config_digest: str


def check_corridors(
    client: Any,
    experiment: str,
    sweep_id: str,
    sweep: str,
    settings: Corridor,
    runs: Sequence[SweepRun],
    planned: Sequence[PlannedChild],
) -> dict[str, tuple[CorridorCheck, ...]]:
    """The checks of each variant, planned or found; nothing where the corridor is off.

    A planned run that did not finish makes its variant's metrics missing. History are the newest
    `settings.max_history` sweeps that began before this one and whose runs of the variant have the same seeds,
    digests and devices.
    """
    if not settings.enabled:
        return {}
    finished: dict[str, list[RunRecord]] = {}
    for run in runs:
        if run.record.finished:
            finished.setdefault(run.variant, []).append(run.record)
    wanted = {run.variant: {seed for name, seed in _pairs(runs, planned) if name == run.variant} for run in runs}
    wanted |= {child.variant: {s for n, s in _pairs(runs, planned) if n == child.variant} for child in planned}
    began = min((run.record.start_ms for run in runs), default=None)
    earlier = _earlier(client, experiment, sweep, sweep_id, began) if began is not None else []
    checks = {}
    for variant, seeds in wanted.items():
        members = finished.get(variant, [])
        past = [found for group in earlier if _alike(found := group.get(variant, []), members)][: settings.max_history]
        complete = len(members) == len(seeds)
        checks[variant] = tuple(
            _check(client, tolerance, members if complete else [], past, settings) for tolerance in settings.metrics
        )
    return checks


def _pairs(runs: Sequence[SweepRun], planned: Sequence[PlannedChild]) -> set[tuple[str, int]]:
    return {(run.variant, run.seed) for run in runs} | {(child.variant, child.seed) for child in planned}


def _earlier(
    client: Any, experiment: str, sweep: str, sweep_id: str, began: int
) -> list[Mapping[str, list[RunRecord]]]:
    """Finished runs of each earlier sweep by variant, newest sweep first."""
    sweeps: dict[str, list[RunRecord]] = {}
    for record in runs_of_sweeps_named(client, experiment, sweep):
        if record.tags.get(SWEEP_ID) not in (None, sweep_id):
            sweeps.setdefault(record.tags[SWEEP_ID], []).append(record)
    before = [group for group in sweeps.values() if min(record.start_ms for record in group) < began]
    return [_variants(group) for group in sorted(before, key=lambda g: -min(r.start_ms for r in g))]


def _variants(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    found: dict[str, list[RunRecord]] = {}
    for (recipe, _, axes), record in newest_of_each(records).items():
        if record.finished:
            found.setdefault(variant_name(recipe, json.loads(axes)), []).append(record)
    return found


def _alike(past: Sequence[RunRecord], now: Sequence[RunRecord]) -> bool:
    return bool(past) and _fingerprint(past) == _fingerprint(now)


def _fingerprint(records: Sequence[RunRecord]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Seeds with digests, and devices: runs that differ in them are not each other's history."""
    described = [(record, describe(record)) for record in records]
    seeds = frozenset((found[1], record.tags.get(CONFIG_DIGEST)) for record, found in described if found)
    return seeds, frozenset(record.tags.get("device") for record in records)


def _check(
    client: Any,
    tolerance: Tolerance,
    members: Sequence[RunRecord],
    past: Sequence[Sequence[RunRecord]],
    settings: Corridor,
) -> CorridorCheck:
    value = _value(client, members, tolerance.metric)
    history = [_value(client, records, tolerance.metric) for records in past]
    return corridor(
        tolerance.metric,
        value,
        history,
        settings.width,
        tolerance.relative,
        tolerance.absolute,
        settings.min_history,
    )


def _value(client: Any, records: Sequence[RunRecord], metric: str) -> float | None:
    """Mean over runs of the metric's last value (eval/*) or its median over steps; None where a run lacks it."""
    found = [_of_run(client, record, metric) for record in records]
    known = [value for value in found if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def _of_run(client: Any, record: RunRecord, metric: str) -> float | None:
    if metric not in record.latest:
        return None
    if metric.startswith("eval/"):
        return record.latest[metric]
    points = with_series(client, record, [metric]).series[metric]
    return finite_median([value for _, value in points])
