"""Circuit breakers of a run: rules on the metrics of each step, what they say, and the evidence that they leave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conf.schema import BreakerRule
from flows.console import Console
from flows.side_records import StepLines
from infra.journal import Entry
from infra.mlflow_run import metrics_of
from tasks.numerics.breakers import Bounds, trips

BREAKERS: Final = "breakers.jsonl"
"""Lines of kind `<rule number> <metric> <action>`, one for each time that a rule tripped: its values, by step."""

EQUAL_REWARDS: Final = "reward/zero_variance_fraction"
BF16_ROLLOUT: Final = "bf16_rollout"


class BreakerError(RuntimeError):
    """A rule with the action stop has tripped; `metric` is whose."""

    def __init__(self, metric: str, message: str) -> None:
        super().__init__(message)
        self.metric = metric


class NothingTrainedError(RuntimeError):
    """A run is at its end, and none of its updates was made."""


@dataclass(frozen=True)
class Trip:
    """A rule that has tripped, and what is to be said of it."""

    rule: BreakerRule
    text: str


class Breakers:
    """Judges a run's steps one after another; `known`: entries of the journal of a run that goes on after `start`."""

    def __init__(
        self, rules: tuple[BreakerRule, ...], path: Path, console: Console, known: Iterable[Entry], start: int
    ) -> None:
        self._rules = rules
        self._evidence = StepLines(path)
        self._console = console
        self._series: dict[str, list[tuple[int, float]]] = {rule.metric: [] for rule in rules}
        for entry in known:
            if entry.kind == "step" and entry.step <= start:
                self._note(entry.step, metrics_of(entry))

    def judge(self, step: int, metrics: Mapping[str, float]) -> tuple[Trip, ...]:
        """After a step: the rules that trip, each with its evidence written, those that only warn already told."""
        self._note(step, metrics)
        found = []
        for number, rule in enumerate(self._rules):
            series = self._series[rule.metric]
            bounds = Bounds(rule.above, rule.below)
            if not series or series[-1][0] != step:
                continue
            if not trips(bounds, [value for _, value in series], rule.patience, every=rule.action == "stop"):
                continue
            last = {f"step {at}": value for at, value in series[-rule.patience :]}
            self._evidence.add(f"{number} {rule.metric} {rule.action}", step, last)
            found.append(Trip(rule, _said(number, rule, bounds, step, series)))
            if rule.action != "stop":
                self._console.say(f"warning, step {step}: {found[-1].text}")
        return tuple(found)

    def _note(self, step: int, metrics: Mapping[str, float]) -> None:
        for metric, series in self._series.items():
            if metric in metrics:
                series.append((step, metrics[metric]))


def _said(number: int, rule: BreakerRule, bounds: Bounds, step: int, series: list[tuple[int, float]]) -> str:
    value = series[-1][1]
    shown = f"{value:.4g}" if math.isfinite(value) else str(value)
    since = f"for {rule.patience} steps, the last of them {step}" if rule.patience > 1 else f"at step {step}"
    return f"{rule.metric} = {shown} ({bounds}) {since}: breakers.rules[{number}], action {rule.action}"


def check_something_was_trained(entries: Iterable[Entry], updates_per_step: int) -> None:
    """`NothingTrainedError` where no update of any step was made; nothing for a run without steps in its journal."""
    steps = [metrics_of(entry) for entry in entries if entry.kind == "step"]
    planned = updates_per_step * len(steps)
    skipped, empty = (sum(s.get(f"optim/{name}", 0.0) for s in steps) for name in ("skipped_steps", "empty_updates"))
    if planned and skipped + empty >= planned:
        raise NothingTrainedError(
            f"none of {planned} updates in {len(steps)} steps was made: {skipped:.0f} skipped, since their gradient "
            f"was not finite (optim/skipped_steps), and {empty:.0f} without a token to learn from (optim/empty_updates)"
        )
