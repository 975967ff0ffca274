"""Mismatch metrics against the formulas in fp64, by hand where that is short."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.mismatch import (
    CLAMP,
    NonFiniteScoreError,
    js_terms,
    k3,
    log_ratios,
    mismatch_metrics,
    nearest_rank,
    sequence_mismatch_metrics,
)

NAMES = {
    "mismatch/token_mult_prob_error",
    "mismatch/gen_kl",
    "mismatch/policy_kl",
    "mismatch/js",
    "mismatch/max_abs_logprob_diff",
    "mismatch/p99_abs_logprob_diff",
    "mismatch/clamped_tokens",
    "mismatch/missing_rollout_logprobs",
}
SEQUENCE_NAMES = {
    "mismatch/ppl_ratio",
    "mismatch/log_ppl_diff",
    "mismatch/log_ppl_abs_diff",
    "mismatch/chi2_token",
    "mismatch/chi2_sequence",
    "mismatch/clamped_sequences",
    "mismatch/probability_pearson",
    "mismatch/sequence_mult_prob_error_max",
}


def fp64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def metrics(p: Tensor, q: Tensor, mask: Tensor | None = None) -> dict[str, float]:
    got = mismatch_metrics(log_ratios(p, q, torch.ones_like(p, dtype=torch.bool) if mask is None else mask))
    return {name.removeprefix("mismatch/"): value for name, value in got.items()}


def of_sequences(p: Tensor, q: Tensor, mask: Tensor | None = None) -> dict[str, float]:
    got = sequence_mismatch_metrics(p, q, torch.ones_like(p, dtype=torch.bool) if mask is None else mask)
    assert set(got) == SEQUENCE_NAMES
    return {name.removeprefix("mismatch/"): value for name, value in got.items()}


def exact_k3(x: float) -> float:
    with localcontext() as context:
        context.prec = 60
        return float(Decimal(x).exp() - 1 - Decimal(x))


def test_names() -> None:
    assert set(mismatch_metrics(log_ratios(fp64(-1.0), fp64(-1.0), torch.tensor([True])))) == NAMES


def test_two_tokens_by_hand() -> None:
    # Train doubles one token's probability and halves the other's: d = +log 2, -log 2.
    log2 = math.log(2)
    got = metrics(fp64(math.log(0.5), math.log(0.2)), fp64(math.log(0.25), math.log(0.4)))
    assert got["token_mult_prob_error"] == pytest.approx(2.0, rel=1e-14)
    # k3(log 2) = 1 - log 2, k3(-log 2) = log 2 - 1/2: both directions have the mean 1/4.
    assert got["gen_kl"] == pytest.approx(0.25, rel=1e-13)
    assert got["policy_kl"] == pytest.approx(0.25, rel=1e-13)
    # Mixture of 0.5 and 0.25 is 0.375: ratios 4/3 and 2/3, the same for the other token.
    js = (4 / 3 - 1 - math.log(4 / 3) + 2 / 3 - 1 - math.log(2 / 3)) / 2
    assert got["js"] == pytest.approx(js, rel=1e-12)
    assert got["max_abs_logprob_diff"] == pytest.approx(log2, rel=1e-14)
    assert got["p99_abs_logprob_diff"] == pytest.approx(log2, rel=1e-14)
    assert got["clamped_tokens"] == 0.0 and got["missing_rollout_logprobs"] == 0.0


def test_gen_kl_and_policy_kl_are_the_two_directions() -> None:
    got = metrics(fp64(-1.0), fp64(-3.0))
    assert got["gen_kl"] == pytest.approx(math.exp(2) - 3, rel=1e-14)
    assert got["policy_kl"] == pytest.approx(math.exp(-2) + 1, rel=1e-14)
    assert metrics(fp64(-3.0), fp64(-1.0))["gen_kl"] == pytest.approx(math.exp(-2) + 1, rel=1e-14)


def test_equal_log_probabilities_give_exactly_no_mismatch() -> None:
    p = torch.linspace(-30, 0, 101)
    got = metrics(p, p.clone())
    assert got.pop("token_mult_prob_error") == 1.0
    assert set(got.values()) == {0.0}


def test_random_batch_equals_numpy() -> None:
    g = torch.Generator().manual_seed(0)
    p, q = -5 * torch.rand(40, 50, generator=g), -5 * torch.rand(40, 50, generator=g)
    mask = torch.rand(40, 50, generator=g) < 0.7
    got = metrics(p, q, mask)
    pv, qv = p.numpy()[mask.numpy()].astype(np.float64), q.numpy()[mask.numpy()].astype(np.float64)
    d, m = pv - qv, np.log((np.exp(pv) + np.exp(qv)) / 2)
    want = {
        "token_mult_prob_error": np.exp(np.abs(d)).mean(),
        "gen_kl": (np.exp(d) - 1 - d).mean(),
        "policy_kl": (np.exp(-d) - 1 + d).mean(),
        "js": ((np.exp(pv - m) - 1 - (pv - m) + np.exp(qv - m) - 1 - (qv - m)) / 2).mean(),
        "max_abs_logprob_diff": np.abs(d).max(),
        "p99_abs_logprob_diff": np.sort(np.abs(d))[math.ceil(Fraction(99, 100) * len(d)) - 1],
        "clamped_tokens": 0.0,
        "missing_rollout_logprobs": 0.0,
    }
    assert got == pytest.approx(want, rel=1e-12)


def test_differences_up_to_200_are_clamped_in_exponentials_and_counted() -> None:
    p, q = fp64(-1.0, -201.0, -1.0, -21.0, -1.0), fp64(-201.0, -1.0, -21.0, -1.0, -1.0)
    got = metrics(p, q)
    e20, e_20 = math.exp(20), math.exp(-20)
    assert got["token_mult_prob_error"] == pytest.approx((4 * e20 + 1) / 5, rel=1e-14)
    want_kl = (2 * (e20 - 21) + 2 * (e_20 + 19)) / 5
    assert got["gen_kl"] == pytest.approx(want_kl, rel=1e-13)
    assert got["policy_kl"] == pytest.approx(want_kl, rel=1e-13)
    assert got["max_abs_logprob_diff"] == 200.0 and got["p99_abs_logprob_diff"] == 200.0
    # |d| = 20 exactly is not clamped.
    assert got["clamped_tokens"] == 2.0
    assert CLAMP == 20.0


def test_js_is_bounded_and_flat_beyond_the_clamp() -> None:
    d = fp64(20.0, 25.0, 200.0, 700.0)
    js = js_terms(d * 0, -d)
    # At d = 20 the mixture is half the larger: log ratios log 2 (nearly) and log 2 - 20.
    upper, lower = math.log(2) - math.log1p(math.exp(-20)), math.log(2) - 20 - math.log1p(math.exp(-20))
    assert js.tolist() == pytest.approx([(exact_k3(upper) + exact_k3(lower)) / 2] * 4, rel=1e-13)
    assert js_terms(-d, d * 0).tolist() == pytest.approx(js.tolist(), rel=1e-13)


@settings(max_examples=60, deadline=None)
@given(st.floats(-19, 19), st.floats(-30, 0))
def test_js_of_one_token_equals_the_definition(d: float, q: float) -> None:
    got = float(js_terms(fp64(q) + d, fp64(q)))
    with localcontext() as context:
        context.prec = 60
        x, y = Decimal(q + d), Decimal(q)
        mixture = ((x.exp() + y.exp()) / 2).ln()
        want = float(sum(((v - mixture).exp() - 1 - (v - mixture) for v in (x, y)), Decimal(0)) / 2)
    # The reference itself loses 60 digits by cancellation.
    assert got == pytest.approx(want, rel=1e-12, abs=1e-50)
    assert got >= 0


def test_masked_positions_may_hold_anything() -> None:
    p, q = fp64(-1.0, math.nan, -1.0, math.inf, 1e300), fp64(-2.0, -1.0, math.nan, -math.inf, -1e300)
    mask = torch.tensor([True, False, False, False, False])
    assert metrics(p, q, mask) == metrics(fp64(-1.0), fp64(-2.0))
    assert metrics(fp64(-1.0, -201.0), fp64(-2.0, -1.0), torch.tensor([True, False]))["clamped_tokens"] == 0.0


@pytest.mark.parametrize("absent", [math.nan, math.inf, -math.inf])
def test_missing_rollout_logprob_counts_as_no_difference_and_is_reported(absent: float) -> None:
    got = metrics(fp64(-1.0, -2.0, -3.0, -4.0), fp64(absent, -2.5, absent, absent), torch.tensor([1, 1, 1, 0]).bool())
    assert got["missing_rollout_logprobs"] == 2.0
    assert got["token_mult_prob_error"] == pytest.approx((1 + math.exp(0.5) + 1) / 3, rel=1e-14)
    assert got["gen_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 3, rel=1e-13)
    assert got["js"] == pytest.approx(float(js_terms(fp64(-2.0), fp64(-2.5))) / 3, rel=1e-13)
    assert got["max_abs_logprob_diff"] == 0.5


def test_empty_selection_gives_zero() -> None:
    for p in (torch.full((3, 4), math.nan), torch.empty(0, 5)):
        got = metrics(p, p.clone(), torch.zeros_like(p, dtype=torch.bool))
        assert len(got) == len(NAMES) and all(value == 0.0 for value in got.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_score_at_a_valid_token_is_an_error(bad: float) -> None:
    with pytest.raises(NonFiniteScoreError, match="2 scored log-probabilities are not finite"):
        log_ratios(fp64(-1.0, bad, bad, bad), fp64(-1.0, -1.0, -1.0, -1.0), torch.tensor([True, True, True, False]))


def test_differences_are_formed_in_fp64() -> None:
    p, q = torch.tensor([-1e-3], dtype=torch.float32), torch.tensor([-1.1e-3], dtype=torch.float32)
    ratios = log_ratios(p, q, torch.tensor([True]))
    assert ratios.d.dtype == ratios.clamped.dtype == torch.float64
    assert float(ratios.d) == float(p.double()) - float(q.double())
    big = torch.full((10_000,), -1.0)
    error = metrics(big, big - 1e-3)["token_mult_prob_error"]
    assert error == pytest.approx(math.exp(float(big[0].double()) - float((big[0] - 1e-3).double())), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_k3_is_accurate_from_tiny_to_large(sign: int, dtype: torch.dtype) -> None:
    x = sign * torch.logspace(-15, math.log10(20.0), 300, dtype=dtype)
    want = fp64(*(exact_k3(v) for v in x.tolist()))
    relative = ((k3(x).to(torch.float64) - want) / want).abs().max()
    assert float(relative) < 8 * torch.finfo(dtype).eps


def test_k3_at_zero_and_its_gradient() -> None:
    assert k3(fp64(0.0, -0.0)).tolist() == [0.0, 0.0]
    x = torch.tensor([0.0, 1e-6, -1e-6, 0.24, 0.26, -0.26, 3.0, -20.0, 20.0], requires_grad=True)
    k3(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), torch.expm1(x.detach().double()), rtol=1e-6, atol=0.0)


@settings(max_examples=80, deadline=None)
@given(st.floats(-20, 20))
def test_k3_is_never_negative(x: float) -> None:
    assert float(k3(fp64(x))) >= 0 and float(k3(torch.tensor(x, dtype=torch.float32))) >= 0


def test_nearest_rank_by_hand() -> None:
    x = torch.arange(1, 101).to(torch.float64).flip(0)
    assert [nearest_rank(x, share) for share in (0.99, 0.5, 0.001, 0.991, 1.0)] == [99.0, 50.0, 1.0, 100.0, 100.0]
    assert nearest_rank(fp64(7.0), 0.01) == 7.0
    assert nearest_rank(fp64(), 0.99) == 0.0


@pytest.mark.parametrize("percent", ["7", "33", "50", "90", "95", "99", "99.5", "99.9", "99.99", "100"])
def test_nearest_rank_is_not_moved_by_floating_point(percent: str) -> None:
    for n in (1, 3, 10, 99, 100, 101, 999, 1000, 1001, 5000, 10_000):
        want = math.ceil(Fraction(percent) / 100 * n)
        assert nearest_rank(torch.arange(1, n + 1), float(percent) / 100) == want


def test_sequences_by_hand() -> None:
    # Train over rollout: 2 and 1/2 in the first sequence, 2 in the second; the third has no response.
    p = fp64(0.5, 0.2, 0.8, 0.3, 0.1, 0.7).log().reshape(3, 2)
    q = fp64(0.25, 0.4, 0.4, 0.9, 0.8, 0.2).log().reshape(3, 2)
    got = of_sequences(p, q, torch.tensor([[True, True], [True, False], [False, False]]))
    log2 = math.log(2)
    # Mean d is 0 and log 2, so the perplexities' ratio is 1 and 1/2.
    assert got["ppl_ratio"] == pytest.approx(0.75, rel=1e-14)
    assert got["log_ppl_diff"] == pytest.approx(-log2 / 2, rel=1e-14)
    assert got["log_ppl_abs_diff"] == pytest.approx(log2 / 2, rel=1e-14)
    # Squared token weights 4, 1/4, 4; squared products 1 and 4.
    assert got["chi2_token"] == pytest.approx(8.25 / 3 - 1, rel=1e-14)
    assert got["chi2_sequence"] == pytest.approx(1.5, rel=1e-14)
    assert got["sequence_mult_prob_error_max"] == pytest.approx(2.0, rel=1e-14)
    assert got["clamped_sequences"] == 0.0
    # Probabilities (0.5, 0.2, 0.8) and (0.25, 0.4, 0.4): deviations (0, -0.3, 0.3) and (-0.1, 0.05, 0.05).
    assert got["probability_pearson"] == pytest.approx(0.0, abs=1e-15)


def test_sequences_of_a_random_batch_equal_numpy() -> None:
    g = torch.Generator().manual_seed(1)
    p, q = -3 * torch.rand(12, 30, generator=g), -3 * torch.rand(12, 30, generator=g)
    mask = torch.rand(12, 30, generator=g) < 0.6
    mask[3] = False
    q = p + 0.2 * (q - p)  # keeps products of 20 ratios below e^20
    rows = [(p[i][mask[i]].double().numpy(), q[i][mask[i]].double().numpy()) for i in range(12) if i != 3]
    differences = np.array([qi.mean() - pi.mean() for pi, qi in rows])
    pv, qv = np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows])
    want = {
        "ppl_ratio": np.mean([np.exp(-pi.mean()) / np.exp(-qi.mean()) for pi, qi in rows]),
        "log_ppl_diff": differences.mean(),
        "log_ppl_abs_diff": np.abs(differences).mean(),
        "chi2_token": np.mean((np.exp(pv) / np.exp(qv)) ** 2) - 1,
        "chi2_sequence": np.mean([np.prod(np.exp(pi) / np.exp(qi)) ** 2 for pi, qi in rows]) - 1,
        "clamped_sequences": 0.0,
        "probability_pearson": np.corrcoef(np.exp(pv), np.exp(qv))[0, 1],
        "sequence_mult_prob_error_max": max(np.exp(np.abs(pi - qi)).mean() for pi, qi in rows),
    }
    assert of_sequences(p, q, mask) == pytest.approx(want, rel=1e-11)


def test_long_sequence_with_a_small_constant_difference() -> None:
    p, q = torch.full((1, 8192), -1.001, dtype=torch.float64), torch.full((1, 8192), -1.0, dtype=torch.float64)
    got = of_sequences(p, q)
    assert got["ppl_ratio"] == pytest.approx(math.exp(1e-3), rel=1e-12)
    assert got["log_ppl_diff"] == got["log_ppl_abs_diff"] == pytest.approx(1e-3, rel=1e-12)
    assert got["chi2_token"] == pytest.approx(-1.9980013326671e-3, rel=1e-11)
    # The product is e^-8.192: its square is all but gone, and chi2 close to its lower bound.
    assert got["chi2_sequence"] == pytest.approx(math.exp(-16.384) - 1, rel=1e-12)
    assert got["sequence_mult_prob_error_max"] == pytest.approx(math.exp(1e-3), rel=1e-12)
    assert got["clamped_sequences"] == 0.0


def test_product_beyond_the_clamp_is_clamped_and_counted() -> None:
    # Sums of d: 20 (not clamped), 24, -24, and 8 * -200 with every token clamped.
    q = torch.full((4, 8), -1.0, dtype=torch.float64)
    got = of_sequences(q + fp64(2.5, 3.0, -3.0, -200.0).unsqueeze(1), q)
    assert got["clamped_sequences"] == 3.0
    assert got["chi2_sequence"] == pytest.approx((2 * math.exp(40) + 2 * math.exp(-40)) / 4 - 1, rel=1e-13)


def test_sequences_with_differences_up_to_200() -> None:
    # One token of d = +200, then one of -200 in another sequence, both beside a token of d = 0.
    p, q = fp64(-1.0, -1.0, -201.0, -1.0).reshape(2, 2), fp64(-201.0, -1.0, -1.0, -1.0).reshape(2, 2)
    got = of_sequences(p, q)
    # Exponentials see d = +-20, the plain differences of log-perplexity do not.
    assert got["ppl_ratio"] == pytest.approx((math.exp(-10) + math.exp(10)) / 2, rel=1e-14)
    assert (got["log_ppl_diff"], got["log_ppl_abs_diff"]) == (0.0, 100.0)
    assert got["chi2_token"] == pytest.approx((math.exp(40) + math.exp(-40) + 2) / 4 - 1, rel=1e-14)
    assert got["chi2_sequence"] == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1, rel=1e-14)
    assert got["sequence_mult_prob_error_max"] == pytest.approx((math.exp(20) + 1) / 2, rel=1e-14)
    # The clamp of the token moved the sums, though they end at +-20 exactly.
    assert got["clamped_sequences"] == 2.0


@pytest.mark.parametrize("garbage", [(-1.0, -201.0), (-201.0, -1.0), (math.nan, math.inf), (-math.inf, math.nan)])
def test_masked_positions_and_empty_responses_change_no_sequence_metric(garbage: tuple[float, float]) -> None:
    p, q = fp64(-1.0, -0.2, -0.4).unsqueeze(0), fp64(-1.3, -0.3, -0.1).unsqueeze(0)
    wide_p, wide_q = (torch.full((3, 6), value, dtype=torch.float64) for value in garbage)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 2:5] = True
    wide_p[1, 2:5], wide_q[1, 2:5] = p[0], q[0]
    # Only the order of summation differs.
    assert of_sequences(wide_p, wide_q, mask) == pytest.approx(of_sequences(p, q), rel=1e-14)


@pytest.mark.parametrize("shape", [(3, 4), (0, 5), (3, 0), (0, 0)])
def test_no_valid_token_gives_zero_sequence_metrics(shape: tuple[int, int]) -> None:
    p = torch.full(shape, math.nan)
    assert set(of_sequences(p, p, torch.zeros(shape, dtype=torch.bool)).values()) == {0.0}


@pytest.mark.parametrize("absent", [math.nan, math.inf, -math.inf])
def test_missing_rollout_logprob_counts_as_no_difference_in_sequences(absent: float) -> None:
    p = fp64(-1.0, -2.0, -0.5, -3.0).reshape(2, 2)
    got = of_sequences(p, fp64(absent, -2.5, -0.75, absent).reshape(2, 2))
    assert got == of_sequences(p, fp64(-1.0, -2.5, -0.75, -3.0).reshape(2, 2))
    # d is (0, 0.5) and (0.25, 0): products e^0.5 and e^0.25.
    assert got["chi2_sequence"] == pytest.approx((math.e + math.sqrt(math.e)) / 2 - 1, rel=1e-13)


def test_sequence_metrics_of_equal_log_probabilities() -> None:
    p = torch.linspace(-30, 0, 60).reshape(4, 15)
    got = of_sequences(p, p.clone())
    ones = {name: got.pop(name) for name in ("ppl_ratio", "probability_pearson", "sequence_mult_prob_error_max")}
    assert set(ones.values()) == {1.0} and set(got.values()) == {0.0}


def test_non_finite_score_in_a_sequence_is_an_error() -> None:
    q = torch.full((2, 2), -1.0)
    with pytest.raises(NonFiniteScoreError, match="1 scored"):
        sequence_mismatch_metrics(torch.tensor([[-1.0, math.nan], [-1.0, -1.0]]), q, torch.ones(2, 2).bool())


@pytest.mark.parametrize(
    ("p", "mask"),
    [
        (torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.int64)),
        (torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)),
        (torch.zeros(1, 3), torch.ones(2, 3, dtype=torch.bool)),
        (torch.zeros(6), torch.ones(6, dtype=torch.bool)),
    ],
)
def test_other_shapes_and_index_masks_are_refused(p: Tensor, mask: Tensor) -> None:
    with pytest.raises(ValueError, match="must share one shape"):
        sequence_mismatch_metrics(p, torch.zeros(2, 3) if p.dim() > 1 else p, mask)


def test_chi2_keeps_its_digits_where_the_weights_are_all_near_one() -> None:
    d = 1e-12
    got = of_sequences(fp64(0.0, 0.0).unsqueeze(0), fp64(-d, -d).unsqueeze(0))
    assert got["chi2_token"] == pytest.approx(2 * d, rel=1e-11)
    assert got["chi2_sequence"] == pytest.approx(4 * d, rel=1e-11)


LOGPROB = st.one_of(st.floats(-1e4, 0), st.floats(-25, 0), st.just(0.0), st.just(-1e4), st.just(-1e-300))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 4), st.integers(0, 5), st.sampled_from([1.0, -1.0, 3e34]))
def test_every_metric_is_finite_and_within_its_bounds(data: st.DataObject, rows: int, columns: int, s: float) -> None:
    n = rows * columns
    p, q = (fp64(*data.draw(st.lists(LOGPROB, min_size=n, max_size=n))).reshape(rows, columns) * s for _ in range(2))
    mask = (fp64(*data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))) == 1).reshape(rows, columns)
    got = metrics(p, q, mask) | of_sequences(p, q, mask)
    assert all(math.isfinite(value) for value in got.values()), got
    assert -1 <= got["probability_pearson"] <= 1
    assert got["chi2_token"] >= -1 and got["chi2_sequence"] >= -1
    assert got["log_ppl_abs_diff"] >= abs(got["log_ppl_diff"]) * (1 - 1e-12)
    assert got["clamped_sequences"] <= mask.any(1).sum()
    # The worst sequence is at least as bad as the average token.
    assert got["sequence_mult_prob_error_max"] >= got["token_mult_prob_error"] * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=12), st.randoms())
def test_sequences_of_one_token_and_the_order_of_sequences(pairs: list[tuple[float, float]], random: Random) -> None:
    p, q = fp64(*(pair[0] for pair in pairs)).unsqueeze(1), fp64(*(pair[1] for pair in pairs)).unsqueeze(1)
    got = of_sequences(p, q)
    assert got["chi2_sequence"] == got["chi2_token"]
    assert got["ppl_ratio"] == pytest.approx(float(torch.exp(q - p).mean()), rel=1e-13)
    order = random.sample(range(len(pairs)), len(pairs))
    assert of_sequences(p[order], q[order]) == pytest.approx(got, rel=1e-11, abs=1e-11)
