"""Intervals, verdicts and corridors against values worked out by hand, by enumeration or from tables."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tasks.numerics.comparison import (
    Interval,
    Judgement,
    accuracy_interval,
    corridor,
    finite_median,
    judge_accuracy,
    judge_mismatch,
    judge_speed,
    mean_interval,
    overall,
    paired_difference,
    ratio_interval,
    speed_words,
    speedup,
    t_quantile,
)

LIMITS = {"width": 3.0, "relative": 0.0, "absolute": 0.0, "min_history": 3}


@pytest.mark.parametrize(
    ("degrees", "value"),
    # Student's own table, two-sided 95 %.
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227), (120, 1.97993)],
)
def test_t_quantiles_are_those_of_the_table(degrees: int, value: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(value, rel=2e-6)
    assert t_quantile(0.5, degrees) == pytest.approx(0.0, abs=1e-12)


def _enumerated(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Quantiles over every possible resample, seeds then prompts, each equally likely."""
    seeds, prompts = values.shape
    means = [
        values[np.ix_(rows, columns)].mean()
        for rows in itertools.product(range(seeds), repeat=seeds)
        for columns in itertools.product(range(prompts), repeat=prompts)
    ]
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2], method="inverted_cdf")
    return float(low), float(high)


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
def test_the_bootstrap_is_the_enumeration_of_all_resamples(confidence: float) -> None:
    solved = np.array([[1, 0, 1, 1], [0, 0, 1, 0]], dtype=float)
    found = accuracy_interval(solved, confidence, resamples=100_000)
    assert found.value == 0.5 and found.seeds == 2
    low, high = _enumerated(solved, confidence)
    # Means are multiples of 1/8; the quantile of so many draws is the same multiple.
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_one_seed_has_the_width_of_the_binomial() -> None:
    solved = np.zeros((1, 400))
    solved[0, :100] = 1
    found = accuracy_interval(solved, 0.95, resamples=20_000)
    reach = 1.95996 * math.sqrt(0.25 * 0.75 / 400)
    assert found.low == pytest.approx(0.25 - reach, abs=0.003)
    assert found.high == pytest.approx(0.25 + reach, abs=0.003)


def test_equal_answers_of_all_seeds_do_not_count_as_more_prompts() -> None:
    row = np.array([1.0] * 50 + [0.0] * 50)
    one, many = accuracy_interval([row]), accuracy_interval([row] * 8)
    assert one.low is not None and one.high is not None and many.low is not None and many.high is not None
    assert many.high - many.low == pytest.approx(one.high - one.low, abs=0.02)


def test_pairs_cancel_what_makes_a_prompt_hard() -> None:
    baseline = np.random.default_rng(1).integers(0, 2, size=(3, 200)).astype(float)
    same = paired_difference(baseline, baseline)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    worse = baseline.copy()
    worse[:, :20] = 0
    found = paired_difference(worse, baseline)
    assert found.value == pytest.approx((worse - baseline).mean())
    assert found.low is not None and found.high is not None and found.low < found.value < found.high < 0
    assert found.high - found.low < 0.12


def test_shapes_and_values_that_are_no_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="same"):
        paired_difference([[1, 0]], [[1, 0, 1]])
    for bad in ([], [1.0, 0.0], [[float("nan")]], [[]]):
        with pytest.raises(ValueError, match="solved must be finite"):
            accuracy_interval(bad)


def test_means_and_ratios_over_seeds() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    reach = 4.30265 * 1.0 / math.sqrt(3)
    assert found.value == 2.0
    assert (found.low, found.high) == (pytest.approx(2 - reach, rel=1e-5), pytest.approx(2 + reach, rel=1e-5))
    ratio = ratio_interval([1.0, 4.0])
    # Logs 0 and log 4: mean log 2, standard deviation log 4 / sqrt 2, divided by sqrt 2.
    assert ratio.value == pytest.approx(2.0)
    assert ratio.high == pytest.approx(2 * math.exp(12.7062 * math.log(4) / 2), rel=1e-4)
    assert ratio_interval([1.25]) == Interval(pytest.approx(1.25), None, None, 1)  # type: ignore[arg-type]
    for bad in ([], [0.0], [-1.0], [float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="ratios"):
            ratio_interval(bad)


def test_speedups_are_ratios_of_medians_and_faster_is_above_one() -> None:
    assert speedup([10, 30, 20], [8, 10, 12], higher_is_faster=True) == 2.0
    assert speedup([2.0, 2.0, 100.0], [1.0], higher_is_faster=False) == 0.5
    for ours, theirs in (([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([float("nan")], [1.0]), ([1.0], [0.0])):
        assert speedup(ours, theirs, higher_is_faster=True) is None
    assert finite_median([1.0, float("nan")]) is None


@pytest.mark.parametrize(
    ("difference", "outcome"),
    [
        (Interval(0.0, -0.01, 0.01, 3), "pass"),
        (Interval(-0.02, -0.02, -0.02, 3), "pass"),
        (Interval(-0.1, -0.12, -0.08, 3), "fail"),
        (Interval(-0.01, -0.05, 0.03, 3), "not enough data"),
        (Interval(0.0, None, None, 1), "not enough data"),
        (None, "not enough data"),
    ],
)
def test_accuracy_is_judged_by_its_interval(difference: Interval | None, outcome: str) -> None:
    assert judge_accuracy(difference, 0.02).outcome == outcome


@pytest.mark.parametrize(
    ("ratio", "minimum", "outcome", "words"),
    [
        (Interval(0.8, 0.7, 0.9, 3), None, "not judged", "was slower"),
        (Interval(0.8, 0.7, 0.9, 3), 1.15, "fail", "was slower"),
        (Interval(1.3, 1.2, 1.4, 3), 1.15, "pass", "was faster"),
        (Interval(1.1, 1.05, 1.2, 3), 1.15, "not enough data", "was faster"),
        (Interval(1.1, 0.9, 1.3, 3), 1.15, "not enough data", "not distinguishable"),
        (Interval(1.3, None, None, 1), 1.15, "not enough data", "not enough data"),
        (None, 1.15, "not enough data", "no times"),
        (None, None, "not judged", "no times"),
    ],
)
def test_speed_is_said_in_words_and_judged_by_its_interval(
    ratio: Interval | None, minimum: float | None, outcome: str, words: str
) -> None:
    found = judge_speed("rollout", ratio, minimum)
    assert found.outcome == outcome
    assert words in found.reason
    assert ratio is None or speed_words("rollout", ratio) == found.reason


@pytest.mark.parametrize(
    ("medians", "outcome"),
    [
        ([1.01, 1.02], "pass"),
        ([1.01, 1.06], "fail"),
        ([1.01, float("nan")], "fail"),
        ([1.01, 0.99], "fail"),
        ([1.0], "pass"),
        ([1.01, None], "not enough data"),
        ([1.06, None], "fail"),
        ([None], "not enough data"),
        ([], "not enough data"),
    ],
)
def test_mismatch_of_every_seed_counts(medians: list[float | None], outcome: str) -> None:
    assert judge_mismatch(medians, 1.05).outcome == outcome


def test_one_failure_fails_and_one_gap_leaves_it_open() -> None:
    made = {name: Judgement("g", name, "") for name in ("pass", "fail", "not enough data", "not judged")}  # type: ignore[arg-type]
    assert overall([made["pass"], made["not enough data"], made["fail"]]) == "fail"
    assert overall([made["pass"], made["not enough data"]]) == "not enough data"
    assert overall([made["pass"], made["not judged"]]) == "pass"
    assert overall([made["not judged"]]) == overall([]) == "not judged"


def test_the_corridor_is_median_and_deviation_of_the_history() -> None:
    history = [1.0, 2.0, 3.0, 4.0, 100.0]
    # Median 3, absolute deviations 2 1 0 1 97 with the median 1.
    reach = 3 * 1.4826
    found = corridor("m", 3.0 + reach - 1e-9, history, **LIMITS)  # type: ignore[arg-type]
    assert (found.low, found.high) == (pytest.approx(3 - reach), pytest.approx(3 + reach))
    assert found.place == "inside" and not found.failed and found.history == 5
    for value, place in ((3 + reach + 1e-6, "above"), (3 - reach - 1e-6, "below")):
        outside = corridor("m", value, history, **LIMITS)  # type: ignore[arg-type]
        assert outside.place == place and outside.failed


def test_equal_values_get_a_corridor_from_the_floors() -> None:
    floors = LIMITS | {"relative": 0.1, "absolute": 0.02}
    assert corridor("m", 1.099, [1.0] * 3, **floors).place == "inside"  # type: ignore[arg-type]
    assert corridor("m", 1.101, [1.0] * 3, **floors).place == "above"  # type: ignore[arg-type]
    assert corridor("m", 0.019, [0.0] * 3, **floors).place == "inside"  # type: ignore[arg-type]
    assert corridor("m", -0.021, [0.0] * 3, **floors).place == "below"  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_what_is_missing_or_not_finite_fails_with_and_without_history(value: float | None) -> None:
    for history in ([], [1.0] * 5):
        found = corridor("m", value, history, **LIMITS)  # type: ignore[arg-type]
        assert found.place == "missing" and found.failed and found.value is None


def test_failures_of_the_past_are_no_history() -> None:
    found = corridor("m", 5.0, [1.0, 1.0, None, float("nan")], **LIMITS)  # type: ignore[arg-type]
    assert found.place == "not enough history" and not found.failed and found.history == 2
