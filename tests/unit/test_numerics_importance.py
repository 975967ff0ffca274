"""Importance weights and their metrics, exact values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.correction import Correction, Weighting, correct
from tasks.numerics.importance import importance_metrics
from tasks.numerics.mismatch import log_ratios

CAP, UNWEIGHTED = Weighting("token", upper=2.0), Weighting("none")
NAMES = ("mean", "max", "ess", "truncated_fraction", "truncated_mean", "above_fraction", "below_fraction")


def fp64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def weights(p: Tensor, q: Tensor, mask: Tensor | None = None, weighting: Weighting = CAP) -> list[float]:
    """Weights of one sequence."""
    mask = torch.ones_like(p, dtype=torch.bool) if mask is None else mask
    out = correct(p[None], q[None], mask[None], torch.zeros(1), Correction(weighting))
    got: list[float] = out.weights[0].tolist()
    return got


def metrics(d: list[float], cap: float | None = 2.0, lower: float = 0.0) -> dict[str, float]:
    ratios = log_ratios(fp64(*d), torch.zeros(len(d), dtype=torch.float64), torch.ones(len(d), dtype=torch.bool))
    return {name.removeprefix("importance/"): value for name, value in importance_metrics(ratios, cap, lower).items()}


def test_weights_are_the_ratio_of_train_to_rollout_cut_at_the_cap() -> None:
    p = fp64(*(math.log(v) for v in (0.3, 0.1, 0.2, 0.5, 0.9)))
    q = fp64(*(math.log(v) for v in (0.3, 0.2, 0.1001, 0.2, 0.1)))
    assert weights(p, q) == pytest.approx([1.0, 0.5, 0.2 / 0.1001, 2.0, 2.0], rel=1e-6)
    assert weights(p, q, weighting=Weighting("token", upper=3.0)) == pytest.approx(
        [1.0, 0.5, 0.2 / 0.1001, 2.5, 3.0], rel=1e-6
    )


def test_no_correction_is_one_at_valid_and_zero_at_masked_tokens() -> None:
    mask = torch.tensor([True, False, True])
    assert weights(fp64(-1.0, -1.0, -5.0), fp64(-2.0, -2.0, -1.0), mask, UNWEIGHTED) == [1.0, 0.0, 1.0]


def test_differences_up_to_200() -> None:
    p, q = fp64(-1.0, -201.0, -1.0, -31.0), fp64(-201.0, -1.0, -1.0, -1.0)
    e_20 = pytest.approx(math.exp(-20), rel=1e-6)
    assert weights(p, q) == [2.0, e_20, 1.0, e_20]
    raw = weights(p, q, weighting=Weighting("token", upper=1e12))
    assert raw[0] == pytest.approx(math.exp(20), rel=1e-6)
    mask = torch.tensor([False, False, True, False])
    assert weights(p, q, mask) == [0.0, 0.0, 1.0, 0.0]


def test_missing_rollout_logprob_gives_weight_one() -> None:
    p = fp64(-1.0, -2.0, -3.0, -4.0)
    assert weights(p, fp64(math.nan, math.inf, -math.inf, -4.0)) == [1.0] * 4
    # Even where the cap would be below 1 the other way round: missing is d = 0, not "no cap".
    assert weights(p, fp64(math.nan, -4.0, math.nan, -4.0)) == [1.0, 2.0, 1.0, 1.0]


def test_masked_positions_may_hold_anything_and_weigh_nothing() -> None:
    p = fp64(math.nan, math.inf, -math.inf, -1.0, -1.0)
    q = fp64(-1.0, math.nan, math.inf, -math.inf, -1.0)
    assert weights(p, q, torch.tensor([False, False, False, False, True])) == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_weights_carry_no_gradient_and_are_fp32() -> None:
    p = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    q, mask = torch.tensor([[-1.5, -2.0]]), torch.tensor([[True, True]])
    for weighting in (CAP, UNWEIGHTED):
        w = correct(p, q, mask, torch.zeros(1), Correction(weighting)).weights
        assert w.dtype == torch.float32 and w.shape == p.shape and not w.requires_grad


def test_exponential_is_taken_in_fp64() -> None:
    p, q = torch.tensor([-1.0]), torch.tensor([-1.25])
    assert weights(p, q) == [float(torch.tensor(math.exp(0.25), dtype=torch.float32))]


def test_metrics_by_hand() -> None:
    # Raw weights 1, 2, 4, 1/2; a weight equal to the cap is not above it.
    got = metrics([0.0, math.log(2.0), math.log(4.0), math.log(0.5)], cap=2.0 * (1 + 1e-12))
    assert got["mean"] == pytest.approx(7.5 / 4, rel=1e-14)
    assert got["max"] == pytest.approx(4.0, rel=1e-14)
    assert got["ess"] == pytest.approx(7.5**2 / (4 * (1 + 4 + 16 + 0.25)), rel=1e-14)
    assert got["truncated_fraction"] == 0.25
    assert got["truncated_mean"] == pytest.approx((1 + 2 + 2 + 0.5) / 4, rel=1e-10)


def test_a_weight_at_the_cap_is_not_above_it() -> None:
    assert metrics([0.0, 0.0], cap=1.0)["truncated_fraction"] == 0.0


def test_metrics_clamp_the_difference_before_the_exponential() -> None:
    got = metrics([200.0, -200.0])
    assert got["max"] == pytest.approx(math.exp(20), rel=1e-14)
    assert got["mean"] == pytest.approx((math.exp(20) + math.exp(-20)) / 2, rel=1e-14)
    assert got["ess"] == pytest.approx(0.5, rel=1e-12)
    assert got["truncated_fraction"] == 0.5 and got["truncated_mean"] == pytest.approx(1.0, rel=1e-8)


def test_shares_above_and_below_are_of_train_over_rollout() -> None:
    # The inverse reading of 0.6..1.4 would count 0.65 and 0.7 below 0.714, and only 2.0 above 1.667.
    d = [math.log(r) for r in (0.5, 0.65, 0.7, 1.0, 1.3, 1.5, 1.6, 2.0)]
    got = metrics(d, cap=1.4, lower=0.6)
    assert got["above_fraction"] == 3 / 8 and got["below_fraction"] == 1 / 8


def test_a_ratio_at_a_bound_is_neither_above_nor_below() -> None:
    low, high = math.log(0.6), math.log(1.4)
    d = [low, math.nextafter(low, -1), high, math.nextafter(high, 1), 0.0]
    got = metrics(d, cap=1.4, lower=0.6)
    assert got["above_fraction"] == got["below_fraction"] == 1 / 5


def test_shares_are_counted_before_the_clamp() -> None:
    # Bounds beyond e^+-20 can only be passed by unclamped differences.
    got = metrics([200.0, 24.0, -24.0, -200.0, -300.0], cap=math.exp(25), lower=math.exp(-25))
    assert got["above_fraction"] == 1 / 5 and got["below_fraction"] == 2 / 5
    assert got["truncated_fraction"] == 0.0


def test_without_a_cap_nothing_is_above_and_without_a_lower_bound_nothing_below() -> None:
    got = metrics([200.0, 0.0, -200.0], cap=None)
    assert got["above_fraction"] == got["below_fraction"] == got["truncated_fraction"] == 0.0
    assert got["truncated_mean"] == got["mean"] == pytest.approx((math.exp(20) + 1 + math.exp(-20)) / 3, rel=1e-14)


def test_missing_tokens_are_in_neither_share() -> None:
    ratios = log_ratios(fp64(-1.0, -1.0), fp64(math.nan, -math.inf), torch.tensor([True, True]))
    got = importance_metrics(ratios, 1.001, 0.999)
    assert got["importance/above_fraction"] == got["importance/below_fraction"] == 0.0


def test_missing_tokens_enter_the_metrics_with_weight_one() -> None:
    ratios = log_ratios(fp64(-1.0, -1.0), fp64(math.nan, -2.0), torch.tensor([True, True]))
    got = importance_metrics(ratios, 2.0)
    assert got["importance/mean"] == pytest.approx((1 + math.e) / 2, rel=1e-14)
    assert got["importance/truncated_fraction"] == 0.5


def test_empty_selection_gives_zero() -> None:
    got = metrics([])
    assert got == dict.fromkeys(NAMES, 0.0) and set(metrics([0.0])) == set(NAMES)
    assert metrics([], cap=None, lower=0.5) == got


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-200, 200), min_size=1, max_size=50))
def test_effective_sample_size_lies_between_one_sample_and_all(d: list[float]) -> None:
    got = metrics(d)
    assert (1 - 1e-12) / len(d) <= got["ess"] <= 1.0
    assert got["truncated_mean"] <= min(2.0, got["mean"] * (1 + 1e-12)) * (1 + 1e-12)
    assert 0.0 <= got["truncated_fraction"] <= 1.0
    assert got["above_fraction"] == sum(x > math.log(2.0) for x in d) / len(d)
    assert metrics(d, lower=0.5)["below_fraction"] == sum(x < math.log(0.5) for x in d) / len(d)


@pytest.mark.parametrize("n", [1, 3, 7, 199])
def test_equal_weights_have_full_effective_sample_size(n: int) -> None:
    for d in (0.1 * k for k in range(30)):
        ess = metrics([d] * n)["ess"]
        assert ess <= 1.0 and ess == pytest.approx(1.0, rel=1e-13)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=30), st.floats(1.01, 10))
def test_weights_agree_with_the_metrics(pairs: list[tuple[float, float]], cap: float) -> None:
    p, q = fp64(*(a for a, _ in pairs)), fp64(*(b for _, b in pairs))
    mask = torch.ones(len(pairs), dtype=torch.bool)
    mean = float(torch.tensor(weights(p, q, weighting=Weighting("token", upper=cap))).double().mean())
    assert mean == pytest.approx(importance_metrics(log_ratios(p, q, mask), cap)["importance/truncated_mean"], rel=1e-6)
