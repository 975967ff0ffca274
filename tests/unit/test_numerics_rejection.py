"""Rejection rules: which tokens and sequences are kept, against values worked by hand and a plain Python reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.numerics.mismatch import NonFiniteScoreError
from tasks.numerics.rejection import RejectionRule, kept_by, masked_ratios
from tests.unit.correction_support import Bound, padded, rule

LEVELS = ("token", "sequence_mean", "sequence_max", "sequence_sum")
STATISTICS = ("k1", "k2", "k3", "probability")
WIDE = {"k1": (0.5, 2.0), "k2": (None, 0.5), "k3": (None, 0.5), "probability": (-0.5, 0.5)}


def kept_of(
    the_rule: RejectionRule, p: list[list[float]], q: list[list[float]], advantages: list[float] | None = None
) -> list[list[bool]]:
    """What the rule keeps, padding dropped (and checked to be rejected)."""
    p_t, mask = padded(p)
    q_t, _ = padded(q)
    signs = torch.tensor(advantages if advantages is not None else [1.0] * len(p), dtype=torch.float64)
    kept = kept_by(the_rule, masked_ratios(p_t, q_t, mask), signs)
    assert kept.dtype == torch.bool and not bool((kept & ~mask).any())
    return [row[: len(given)].tolist() for row, given in zip(kept, p, strict=True)]


def kept(the_rule: RejectionRule, d: list[list[float]], advantages: list[float] | None = None) -> list[list[bool]]:
    return kept_of(the_rule, d, [[0.0] * len(row) for row in d], advantages)


def logs(*ratios: float) -> list[float]:
    return [math.log(r) for r in ratios]


def test_an_asymmetric_band_is_on_train_over_rollout_and_not_the_inverse() -> None:
    # The inverse reading would keep 0.714..1.667: reject 0.61 and 0.7, keep 1.5.
    ratios = (0.59, 0.61, 0.7, 1.0, 1.39, 1.41, 1.5)
    want = [False, True, True, True, True, False, False]
    assert kept(rule("k1", "token", 0.6, 1.4), [logs(*ratios)]) == [want]
    for level in ("sequence_mean", "sequence_max", "sequence_sum"):
        alone = kept(rule("k1", level, 0.6, 1.4), [[d] for d in logs(*ratios)])
        assert [row[0] for row in alone] == want, level


def test_one_sided_ratio_bounds() -> None:
    d = [logs(1e-6, 0.5, 1.0, 2.0, 1e6)]
    assert kept(rule("k1", "token", 0.5, None), d) == [[False, True, True, True, True]]
    assert kept(rule("k1", "token", None, 2.0), d) == [[True, True, True, True, False]]


def test_bounds_are_inclusive() -> None:
    low, high = math.log(0.6), math.log(1.4)
    d = [[low, math.nextafter(low, -1), high, math.nextafter(high, 1)]]
    assert kept(rule("k1", "token", 0.6, 1.4), d) == [[True, False, True, False]]
    assert kept(rule("k2", "token", None, 0.125), [[0.5, -0.5, 0.5000001]]) == [[True, True, False]]
    # e^0 - e^q is exactly 0.5 at q = -log 2.
    assert kept_of(rule("probability", "token", None, 0.5), [[0.0, 0.0]], [[math.log(0.5), -0.7]]) == [[True, False]]


# Tokens: d = 0.3, -0.2; probabilities 0.5 against 0.3 and 0.1 against 0.15, so +0.2 and -0.05.
# k3: e^0.3 - 1.3 = 0.0498588076, e^-0.2 - 0.8 = 0.0187307531.
GREATEST = [
    ("k1", "sequence_mean", math.exp(0.05)),
    ("k1", "sequence_sum", math.exp(0.1)),
    ("k1", "sequence_max", 1.3498588076),
    ("k2", "sequence_mean", (0.045 + 0.02) / 2),
    ("k2", "sequence_sum", 0.045 + 0.02),
    ("k2", "sequence_max", 0.045),
    ("k3", "sequence_mean", 0.03429478035),
    ("k3", "sequence_sum", 0.0685895607),
    ("k3", "sequence_max", 0.0498588076),
    ("probability", "sequence_mean", 0.075),
    ("probability", "sequence_sum", 0.15),
    ("probability", "sequence_max", 0.2),
]


def two_tokens(statistic: str) -> tuple[list[list[float]], list[list[float]]]:
    if statistic == "probability":
        return [logs(0.5, 0.1)], [logs(0.3, 0.15)]
    return [[0.3 - 1.0, -0.2 - 2.0]], [[-1.0, -2.0]]


@pytest.mark.parametrize(("statistic", "level", "value"), GREATEST)
def test_the_upper_bound_bites_exactly_at_the_statistic(statistic: str, level: str, value: float) -> None:
    p, q = two_tokens(statistic)
    assert kept_of(rule(statistic, level, None, value + 1e-7), p, q) == [[True, True]]
    assert kept_of(rule(statistic, level, None, value - 1e-7), p, q) == [[False, False]]


@pytest.mark.parametrize(
    ("statistic", "level", "value"),
    [
        ("k1", "sequence_mean", math.exp(-0.05)),
        ("k1", "sequence_sum", math.exp(-0.1)),
        ("k1", "sequence_max", math.exp(-0.3)),
        ("probability", "sequence_mean", -0.075),
        ("probability", "sequence_sum", -0.15),
        ("probability", "sequence_max", -0.2),
    ],
)
def test_the_lower_bound_bites_exactly_at_the_statistic(statistic: str, level: str, value: float) -> None:
    # The sides exchanged: every difference changes its sign.
    q, p = two_tokens(statistic)
    assert kept_of(rule(statistic, level, value - 1e-7, None), p, q) == [[True, True]]
    assert kept_of(rule(statistic, level, value + 1e-7, None), p, q) == [[False, False]]


def test_token_level_statistics_by_hand() -> None:
    # k3(1) = e - 2 = 0.71828, k3(-1) = 1/e = 0.36788; k2 is 0.5 for both.
    assert kept(rule("k3", "token", None, 0.5), [[1.0, -1.0]]) == [[False, True]]
    assert kept(rule("k2", "token", None, 0.5), [[1.0, -1.0, 1.01]]) == [[True, True, False]]
    p, q = [logs(0.9, 0.5, 1e-9)], [logs(0.65, 0.71, 0.1)]  # +0.25, -0.21, -0.1
    assert kept_of(rule("probability", "token", -0.2, 0.3), p, q) == [[True, False, True]]
    assert kept_of(rule("probability", "token", -0.3, 0.2), p, q) == [[False, True, True]]


def test_an_outlier_token_vetoes_its_sequence_and_no_other() -> None:
    veto = rule("k1", "sequence_max", 1e-4, 100.0)
    d = [logs(1.0, 0.9e-4, 1.0), logs(1.0, 1.1e-4), logs(99.0), logs(1.0, 101.0)]
    assert kept(veto, d) == [[False] * 3, [True] * 2, [True], [False] * 2]


def test_the_geometric_mean_does_not_see_length_and_the_product_does() -> None:
    # L = 8192, d = -0.001: product e^-8.192 = 2.77e-4, geometric mean 0.9990005.
    long, short = [-1e-3] * 8192, [-1e-3]
    assert [row[0] for row in kept(rule("k1", "sequence_mean", 0.999, 1.001), [long, short])] == [True, True]
    assert [row[0] for row in kept(rule("k1", "sequence_mean", 0.99901, 1.001), [long, short])] == [False, False]
    assert [row[0] for row in kept(rule("k1", "sequence_sum", 0.5, 2.0), [long, short])] == [False, True]
    for factor, want in ((1 - 1e-9, True), (1 + 1e-9, False)):
        bound = math.exp(-8.192) * factor
        assert kept(rule("k1", "sequence_sum", bound, None), [long])[0] == [want] * 8192


def test_bounds_do_not_meet_the_clamp() -> None:
    # Clamped to +-20, all these would look alike.
    d = [[200.0, 31.0, 29.0, -29.0, -31.0, -200.0]]
    band = rule("k1", "token", math.exp(-30), math.exp(30))
    assert kept(band, d) == [[False, False, True, True, False, False]]
    assert kept(rule("k3", "token", None, 150.0), [[-140.0, -200.0]]) == [[True, False]]
    assert kept(rule("k2", "token", None, 19999.0), [[199.0, -199.0, 200.0, -200.0]]) == [[True, True, False, False]]
    # 200 - 190 = 10 in the sum; the clamped values would add to 0.
    assert kept(rule("k1", "sequence_sum", 0.5, 2.0), [[200.0, -190.0]]) == [[False, False]]
    assert kept(rule("k1", "sequence_sum", 0.5, 2.0), [[200.0, -200.0]]) == [[True, True]]


@pytest.mark.parametrize("level", LEVELS)
def test_a_statistic_that_overflows_is_above_every_bound(level: str) -> None:
    k3_rule = rule("k3", level, None, 1e300)
    assert kept(k3_rule, [[1000.0]]) == [[False]]
    assert kept(k3_rule, [[-1000.0]]) == [[True]]


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("level", LEVELS)
def test_masked_values_are_never_seen(statistic: str, level: str) -> None:
    the_rule = rule(statistic, level, *WIDE[statistic])
    junk = [math.nan, math.inf, -math.inf, 200.0, -200.0, -1.0]
    p = torch.tensor([[*junk, -1.0, -1.5]], dtype=torch.float64)
    q = torch.tensor([[*reversed(junk), -1.125, -1.25]], dtype=torch.float64)
    mask = torch.tensor([[False] * 6 + [True, True]])
    got = kept_by(the_rule, masked_ratios(p, q, mask), torch.tensor([1.0]))
    assert got.tolist() == [[False] * 6 + [True, True]]


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_a_missing_rollout_logprob_counts_as_no_difference(statistic: str, level: str, missing: float) -> None:
    lower, upper = {"k1": (0.999, 1.001), "probability": (-1e-9, 1e-9)}.get(statistic, (None, 1e-9))
    assert kept_of(rule(statistic, level, lower, upper), [[-3.0, -0.1]], [[missing, -0.1]]) == [[True, True]]


def test_a_missing_rollout_logprob_counts_in_the_length() -> None:
    # Mean of 0 and 0.2 is 0.1.
    p, q = [[-1.0, -1.0]], [[math.nan, -1.2]]
    assert kept_of(rule("k1", "sequence_mean", None, math.exp(0.1) + 1e-9), p, q) == [[True, True]]
    assert kept_of(rule("k1", "sequence_mean", None, math.exp(0.1) - 1e-9), p, q) == [[False, False]]


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("level", LEVELS)
def test_empty_responses_and_batches(statistic: str, level: str) -> None:
    the_rule = rule(statistic, level, *WIDE[statistic])
    assert kept_of(the_rule, [[], [-1.0]], [[], [-1.0]]) == [[], [True]]
    for shape in ((2, 3), (2, 0), (0, 3)):
        nothing = torch.zeros(shape, dtype=torch.bool)
        ratios = masked_ratios(torch.full(shape, math.nan), torch.zeros(shape), nothing)
        assert torch.equal(kept_by(the_rule, ratios, torch.zeros(shape[0])), nothing)


def test_rules_for_one_sign_of_the_advantage() -> None:
    d = [logs(3.0)] * 3
    advantages = [1.5, 0.0, -0.5]
    assert kept(rule("k1", "token", 0.5, 2.0, "positive"), d, advantages) == [[False], [True], [True]]
    assert kept(rule("k1", "token", 0.5, 2.0, "negative"), d, advantages) == [[True], [True], [False]]
    assert kept(rule("k1", "token", 0.5, 2.0), d, advantages) == [[False]] * 3


def test_off_policy_sequence_mask() -> None:
    # Rejected: advantage below 0 and mean(q - p) above delta = 0.5.
    mask_rule = rule("k1", "sequence_mean", math.exp(-0.5), None, "negative")
    d = [[-0.4, -0.7], [-0.4, -0.5], [-0.4, -0.7], [5.0, 5.0]]
    assert kept(mask_rule, d, [-1.0, -1.0, 1.0, -1.0]) == [[False] * 2, [True] * 2, [True] * 2, [True] * 2]


def test_probability_trust_region_by_the_sign_of_the_advantage() -> None:
    # P - Q: +0.3, -0.3, +0.1 in each sequence.
    p, q = [logs(0.8, 0.2, 0.5)] * 2, [logs(0.5, 0.5, 0.4)] * 2
    advantages = [1.0, -1.0]
    up = kept_of(rule("probability", "token", None, 0.2, "positive"), p, q, advantages)
    down = kept_of(rule("probability", "token", -0.2, None, "negative"), p, q, advantages)
    assert up == [[False, True, True], [True, True, True]]
    assert down == [[True, True, True], [True, False, True]]


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        (("k1", "token", 1.0, 2.0), "lower", "1.0"),
        (("k1", "token", 0.0, 2.0), "lower", "0.0"),
        (("k1", "token", -0.5, 2.0), "lower", "-0.5"),
        (("k1", "token", 0.5, 1.0), "upper", "1.0"),
        (("k1", "token", 0.5, math.inf), "upper", "inf"),
        (("k1", "sequence_mean", math.nan, None), "lower", "nan"),
        (("k2", "token", 0.1, 1.0), "lower", "0.1"),
        (("k3", "token", 0.1, None), "lower", "0.1"),
        (("k2", "token", None, 0.0), "upper", "0.0"),
        (("k3", "sequence_max", None, -1.0), "upper", "-1.0"),
        (("k3", "token", None, math.inf), "upper", "inf"),
        (("probability", "token", 0.0, 0.2), "lower", "0.0"),
        (("probability", "token", -1.01, 0.2), "lower", "-1.01"),
        (("probability", "sequence_mean", None, 1.01), "upper", "1.01"),
        (("probability", "sequence_sum", None, math.inf), "upper", "inf"),
        (("k1", "token", None, None), "lower and upper", "None"),
        (("k4", "token", None, 2.0), "statistic", "'k4'"),
        (("k1", "sequence", None, 2.0), "level", "'sequence'"),
        (("k1", "token", None, 2.0, "both"), "advantages", "'both'"),
    ],
)
def test_senseless_rules_are_refused_by_field_and_value(fields: tuple[Any, ...], field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value}; allowed: "):
        rule(*fields)


def test_the_extremes_of_the_allowed_bounds() -> None:
    assert rule("probability", "sequence_max", -1.0, 1.0).upper == 1.0
    assert rule("probability", "sequence_sum", -7.0, 3.5).lower == -7.0
    assert rule("k1", "sequence_sum", 1e-300, 1e300).name == "k1_sequence_sum"


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_score_is_an_error_at_valid_tokens_only(broken: float) -> None:
    p, q = torch.tensor([[broken, -1.0, broken]]), torch.full((1, 3), -1.0)
    with pytest.raises(NonFiniteScoreError, match=r"^2 scored"):
        masked_ratios(p, q, torch.tensor([[True, True, True]]))
    assert masked_ratios(p, q, torch.tensor([[False, True, False]])).d.tolist() == [[0.0, 0.0, 0.0]]


def test_shapes_that_do_not_fit_are_refused() -> None:
    p, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for q, m in ((torch.zeros(3), mask), (torch.zeros(2, 1), mask), (p, mask[:1])):
        with pytest.raises(ValueError, match="must be"):
            masked_ratios(p, q, m)
    with pytest.raises(ValueError, match="must be"):
        masked_ratios(p[0], p[0], mask[0])
    for advantages in (torch.zeros(3), torch.zeros(1), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match=r"must be \[2\]"):
            kept_by(rule("k1", "token", 0.5, 2.0), masked_ratios(p, p, mask), advantages)


def test_differences_are_taken_in_fp64_without_gradient() -> None:
    p = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    q = torch.tensor([[-1.0000001, math.nan]])
    ratios = masked_ratios(p, q, torch.tensor([[True, True]]))
    assert ratios.d.tolist() == [[float(torch.tensor(-1.0)) - float(torch.tensor(-1.0000001)), 0.0]]
    assert ratios.q.tolist() == [[float(q[0, 0]), -2.0]] and ratios.lengths.tolist() == [2]
    assert not any(getattr(ratios, f.name).requires_grad for f in dataclasses.fields(ratios))
    assert {ratios.p.dtype, ratios.q.dtype, ratios.d.dtype} == {torch.float64}


# Properties, against the definitions in plain Python.


def by_definition(the_rule: RejectionRule, p: list[float], q: list[float], advantage: float) -> list[bool] | None:
    """Kept tokens of one sequence; None where a statistic lies on a bound to rounding."""
    q = [a if not math.isfinite(b) else b for a, b in zip(p, q, strict=True)]
    terms: dict[str, Callable[[float, float], float]] = {
        "k1": lambda a, b: a - b,
        "k2": lambda a, b: (a - b) ** 2 / 2,
        "k3": lambda a, b: math.exp(a - b) - 1 - (a - b),
        "probability": lambda a, b: math.exp(a) - math.exp(b),
    }
    x = [terms[the_rule.statistic](a, b) for a, b in zip(p, q, strict=True)]
    applies = {"any": True, "positive": advantage > 0, "negative": advantage < 0}[the_rule.advantages]
    if not x or not applies:
        return [True] * len(x)
    values = {
        "token": x,
        "sequence_mean": [math.fsum(x) / len(x)],
        "sequence_sum": [math.fsum(x)],
        "sequence_max": x,
    }[the_rule.level]
    lower, upper = the_rule.lower, the_rule.upper
    if the_rule.statistic == "k1":
        lower, upper = (None if bound is None else math.log(bound) for bound in (lower, upper))
    low, high = (-math.inf if lower is None else lower), (math.inf if upper is None else upper)
    if any(abs(v - bound) < 1e-9 * max(1.0, abs(v)) for v in values for bound in (low, high)):
        return None
    inside = [low <= v <= high for v in values]
    return inside if the_rule.level == "token" else [all(inside)] * len(x)


logprob = st.floats(-200, 0)
near = st.floats(-3, 0)


@st.composite
def rules(draw: st.DrawFn) -> RejectionRule:
    statistic = draw(st.sampled_from(STATISTICS))
    lower: Bound = None
    if statistic == "k1":
        lower, upper = draw(st.floats(1e-6, 0.99)), draw(st.floats(1.01, 1e6))
    elif statistic == "probability":
        lower, upper = draw(st.floats(-0.9, -0.01)), draw(st.floats(0.01, 0.9))
    else:
        upper = draw(st.floats(1e-3, 100.0))
    if lower is not None and draw(st.booleans()):
        lower = None
    return rule(
        statistic, draw(st.sampled_from(LEVELS)), lower, upper, draw(st.sampled_from(["any", "positive", "negative"]))
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[float]]:
    score = draw(st.sampled_from([logprob, near]))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    p = [draw(st.lists(score, min_size=n, max_size=n)) for n in lengths]
    q = [draw(st.lists(score | st.just(math.nan), min_size=n, max_size=n)) for n in lengths]
    return p, q, [draw(st.sampled_from([-1.0, 0.0, 2.0])) for _ in lengths]


@settings(max_examples=150, deadline=None)
@given(rules(), batches())
def test_every_rule_is_its_definition(
    the_rule: RejectionRule, batch: tuple[list[list[float]], list[list[float]], list[float]]
) -> None:
    p, q, advantages = batch
    for got, a, b, advantage in zip(kept_of(the_rule, p, q, advantages), p, q, advantages, strict=True):
        want = by_definition(the_rule, a, b, advantage)
        assert want is None or got == want


@settings(max_examples=60, deadline=None)
@given(rules(), batches(), st.floats(1.0, 3.0))
def test_wider_bounds_keep_at_least_as_much(
    the_rule: RejectionRule, batch: tuple[list[list[float]], list[list[float]], list[float]], factor: float
) -> None:
    def wider(bound: Bound) -> Bound:
        if bound is None:
            return None
        if the_rule.statistic == "probability":
            return max(-1.0, min(1.0, bound * factor))
        return bound**factor if the_rule.statistic == "k1" else bound * factor

    wide = dataclasses.replace(the_rule, lower=wider(the_rule.lower), upper=wider(the_rule.upper))
    p, q, advantages = batch
    for narrow_row, wide_row in zip(kept_of(the_rule, p, q, advantages), kept_of(wide, p, q, advantages), strict=True):
        assert all(w or not n for n, w in zip(narrow_row, wide_row, strict=True))


@settings(max_examples=60, deadline=None)
@given(rules(), st.lists(st.lists(st.integers(-2048, 0), min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_padding_and_neighbours_change_nothing(
    the_rule: RejectionRule, codes: list[list[int]], data: st.DataObject
) -> None:
    # Multiples of 1/1024: k1 sums are exact in any order; other sums are compared token by token or at the maximum.
    if the_rule.statistic != "k1" and the_rule.level in ("sequence_sum", "sequence_mean"):
        the_rule = dataclasses.replace(the_rule, level="sequence_max", lower=None if the_rule.lower is None else -0.5)
    p = [[c / 1024 for c in row] for row in codes]
    q = [[data.draw(st.integers(-2048, 0)) / 1024 for _ in row] for row in codes]
    alone = [kept_of(the_rule, [a], [b])[0] for a, b in zip(p, q, strict=True)]
    p_t, mask = padded(p, width=11)
    q_t, _ = padded(q, width=11)
    got = kept_by(the_rule, masked_ratios(p_t, q_t, mask), torch.ones(len(p)))
    assert [row[: len(want)].tolist() for row, want in zip(got, alone, strict=True)] == alone
