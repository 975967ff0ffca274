"""Statistics of a comparison of recipes: intervals of accuracies and speed-ups, verdicts, regression corridors.

Runs of one seed share prompts, data order and sampling seeds, so recipes are compared in pairs. Nothing here knows
where numbers come from; numbers that are missing or not finite never become a figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Outcome = Literal["pass", "fail", "not enough data", "not judged"]
Place = Literal["inside", "below", "above", "missing", "not enough history"]

_MAD_TO_SIGMA = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; `low` and `high` are None where `seeds` are too few for one."""

    value: float
    low: float | None
    high: float | None
    seeds: int


@dataclass(frozen=True)
class Judgement:
    """What one gate says of a recipe, with the sentence that says why."""

    gate: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class CorridorCheck:
    """Where a metric lies in the corridor `low` to `high` of its own history (None without enough of it)."""

    metric: str
    value: float | None
    low: float | None
    high: float | None
    history: int
    place: Place

    @property
    def failed(self) -> bool:
        """Whether it is a regression: outside on either side, missing or NaN."""
        return self.place in ("below", "above", "missing")


def accuracy_interval(solved: ArrayLike, confidence: float = 0.95, resamples: int = 4000, seed: int = 0) -> Interval:
    """Mean of `solved` `[seeds, prompts]` (0 or 1) with a percentile interval of the hierarchical bootstrap.

    Seeds are drawn with replacement, then prompts. Every run answers the same prompts, so a draw of prompts holds for
    all seeds of a resample: drawn anew for each seed, what makes a prompt hard would average out and the interval be
    too narrow (the pigeonhole bootstrap of Owen 2007, Annals of Applied Statistics 1(2), which errs towards width).
    With one seed it covers prompts alone, and with n seeds their part of the variance is (n - 1)/n of what it should
    be, as of any bootstrap. `ValueError` for other shapes and for values that are not finite.
    """
    return _bootstrap(_matrix(solved, "solved"), confidence, resamples, seed)


def paired_difference(
    solved: ArrayLike, baseline: ArrayLike, confidence: float = 0.95, resamples: int = 4000, seed: int = 0
) -> Interval:
    """Interval of mean(`solved`) - mean(`baseline`), both `[seeds, prompts]` with the same seeds and prompts in order.

    As `accuracy_interval`; one draw of seeds and prompts holds for both.
    """
    ours, theirs = _matrix(solved, "solved"), _matrix(baseline, "baseline")
    if ours.shape != theirs.shape:
        raise ValueError(f"baseline has the shape {theirs.shape}, solved {ours.shape}; a pair has the same")
    return _bootstrap(ours - theirs, confidence, resamples, seed)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean over seeds with Student's t interval, for runs of which only totals are known; `ValueError` for none."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"values must be finite and at least one, got {list(values)}")
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(mean, None, None, count)
    reach = t_quantile(0.5 + confidence / 2, count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - reach, mean + reach, count)


def ratio_interval(ratios: Sequence[float], confidence: float = 0.95) -> Interval:
    """Geometric mean of one ratio a seed, with Student's t interval of the logarithms.

    A bootstrap over two or three seeds would be far too narrow. `ValueError` for none, and for ratios that are not
    finite and positive.
    """
    if not ratios or not all(math.isfinite(ratio) and ratio > 0 for ratio in ratios):
        raise ValueError(f"ratios must be finite, positive and at least one, got {list(ratios)}")
    logs = mean_interval([math.log(ratio) for ratio in ratios], confidence)
    low, high = (None if bound is None else math.exp(min(bound, 700.0)) for bound in (logs.low, logs.high))
    return Interval(math.exp(logs.value), low, high, logs.seeds)


def speedup(values: Sequence[float], baseline: Sequence[float], higher_is_faster: bool) -> float | None:
    """How many times faster than the baseline: the ratio of medians over steps; None without two positive medians.

    `values` are rates (`higher_is_faster`) or times.
    """
    ours, theirs = finite_median(values), finite_median(baseline)
    if ours is None or theirs is None or ours <= 0 or theirs <= 0:
        return None
    return ours / theirs if higher_is_faster else theirs / ours


def finite_median(values: Sequence[float]) -> float | None:
    """Median; None for no values, and where one of them is not finite."""
    if not values or not all(math.isfinite(value) for value in values):
        return None
    return statistics.median(values)


def judge_accuracy(difference: Interval | None, max_loss: float) -> Judgement:
    """Non-inferiority: `pass` when the whole interval of the difference to the baseline is above -`max_loss`."""
    gate = f"accuracy loss at most {max_loss:g}"
    if difference is None:
        return Judgement(gate, "not enough data", "no accuracies to compare with the baseline's")
    if difference.low is None or difference.high is None:
        text = f"{difference.value:+.3f} with {_seeds(difference.seeds)}: no interval"
        return Judgement(gate, "not enough data", text)
    text = f"accuracy {difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}] against the baseline"
    if difference.low >= -max_loss:
        return Judgement(gate, "pass", text)
    return Judgement(gate, "fail" if difference.high < -max_loss else "not enough data", text)


def judge_mismatch(medians: Sequence[float | None], maximum: float) -> Judgement:
    """`pass` when the median mismatch of every seed is at most `maximum`.

    One that is NaN is a `fail`, and one below 1 too: the mean of exp|d| is at least 1, whoever logged something else.
    """
    gate = f"mismatch at most {maximum:g}"
    known = [value for value in medians if value is not None]
    if not known:
        return Judgement(gate, "not enough data", "no mismatch was logged")
    if not all(math.isfinite(value) for value in known):
        return Judgement(gate, "fail", "mismatch is not finite")
    if min(known) < 1:
        return Judgement(gate, "fail", f"median {min(known):.5f} is below 1, which no mismatch can be")
    worst = f"largest median {max(known):.5f}"
    if max(known) > maximum:
        return Judgement(gate, "fail", worst)
    if len(known) < len(medians):
        return Judgement(gate, "not enough data", f"{worst}; {len(medians) - len(known)} of {len(medians)} missing")
    return Judgement(gate, "pass", worst)


def judge_speed(what: str, ratio: Interval | None, minimum: float | None) -> Judgement:
    """Speed against the baseline in plain words; judged where there is a `minimum`."""
    gate = f"{what} speed-up" + ("" if minimum is None else f" at least {minimum:g}")
    if ratio is None:
        return Judgement(gate, "not judged" if minimum is None else "not enough data", f"{what}: no times to compare")
    text = speed_words(what, ratio)
    if minimum is None:
        return Judgement(gate, "not judged", text)
    if ratio.low is None or ratio.high is None:
        return Judgement(gate, "not enough data", text)
    outcome: Outcome = "pass" if ratio.low >= minimum else "fail" if ratio.high < minimum else "not enough data"
    return Judgement(gate, outcome, text)


def speed_words(what: str, ratio: Interval) -> str:
    """Faster, slower, or not distinguishable from the baseline: the latter while the interval holds 1."""
    if ratio.low is None or ratio.high is None:
        return f"{what}: not enough data, {ratio.value:.3f} times the baseline's speed with {_seeds(ratio.seeds)}"
    figures = f"{ratio.value:.3f} times [{ratio.low:.3f}, {ratio.high:.3f}] the baseline's speed"
    if ratio.low > 1:
        return f"{what} was faster: {figures}"
    return f"{what} was slower: {figures}" if ratio.high < 1 else f"{what}: not distinguishable, {figures}"


def overall(judgements: Sequence[Judgement]) -> Outcome:
    """`fail` for one that fails, else `not enough data` for one that cannot be decided, else `pass`."""
    outcomes = {judgement.outcome for judgement in judgements}
    for outcome in ("fail", "not enough data", "pass"):
        if outcome in outcomes:
            return outcome
    return "not judged"


def corridor(
    metric: str,
    value: float | None,
    history: Sequence[float | None],
    width: float,
    relative: float,
    absolute: float,
    min_history: int,
) -> CorridorCheck:
    """Check a value against its own history: median +- the largest of three reaches.

    They are `width` times the robust standard deviation (1.4826 times the median absolute deviation), `relative` times
    the median's magnitude, and `absolute`: with few or equal values the deviation alone would be about 0. Values of the
    history that are missing or not finite were failures then and are left out.
    """
    past = [entry for entry in history if entry is not None and math.isfinite(entry)]
    low = high = None
    if len(past) >= max(1, min_history):
        centre = statistics.median(past)
        sigma = _MAD_TO_SIGMA * statistics.median(abs(entry - centre) for entry in past)
        reach = max(width * sigma, relative * abs(centre), absolute)
        low, high = centre - reach, centre + reach
    if value is None or not math.isfinite(value):
        return CorridorCheck(metric, None, low, high, len(past), "missing")
    if low is None or high is None:
        return CorridorCheck(metric, value, None, None, len(past), "not enough history")
    place: Place = "below" if value < low else "above" if value > high else "inside"
    return CorridorCheck(metric, value, low, high, len(past), place)


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution for `probability` in [0.5, 1) and integer `degrees` >= 1, by bisection."""
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"probability must be in [0.5, 1) and degrees >= 1, got {probability} and {degrees}")
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0: the finite sums 26.7.3 and 26.7.4 of Abramowitz and Stegun (1964)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term, total = 1.0, 0.0
    if degrees % 2 == 0:
        for k in range(degrees // 2):
            total += term
            term *= square * (2 * k + 1) / (2 * k + 2)
        return 0.5 + sine * total / 2
    for k in range((degrees - 1) // 2):
        total += term
        term *= square * (2 * k + 2) / (2 * k + 3)
    return 0.5 + (angle + sine * math.cos(angle) * total) / math.pi


def _bootstrap(values: NDArray[np.float64], confidence: float, resamples: int, seed: int) -> Interval:
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(f"confidence must be in (0, 1) and resamples >= 1, got {confidence} and {resamples}")
    seeds, prompts = values.shape
    random = np.random.default_rng(seed)
    of_seeds = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples) / seeds
    of_prompts = random.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples) / prompts
    means = ((of_seeds @ values) * of_prompts).sum(axis=1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(values.mean()), float(low), float(high), seeds)


def _matrix(values: ArrayLike, name: str) -> NDArray[np.float64]:
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2 or not matrix.size or not np.isfinite(matrix).all():
        raise ValueError(f"{name} must be finite and [seeds, prompts] with at least one of each, got {matrix.shape}")
    return matrix


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"
