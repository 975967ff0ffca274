"""KL to a reference: estimates by hand, and the expected gradient against exact enumeration of a vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.kl import KlEstimator, KlGradient, kl_estimate, kl_term

ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")
GRADIENTS: tuple[KlGradient, ...] = ("unbiased", "pathwise")


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def valid(like: Tensor) -> Tensor:
    return torch.ones(like.shape, dtype=torch.bool)


def value_and_gradient(
    logprobs: Tensor, reference: Tensor, estimator: KlEstimator, gradient: KlGradient, weight: Tensor | None = None
) -> tuple[list[float], list[float]]:
    leaf = logprobs.detach().clone().requires_grad_()
    weight = torch.ones_like(leaf) if weight is None else weight
    term = kl_term(leaf, reference, valid(leaf), estimator, gradient, weight)
    (got,) = torch.autograd.grad(term.sum(), leaf)
    return term[0].tolist(), got[0].tolist()


def test_estimates_by_hand() -> None:
    # x = log ref - log pi = log 2 and -log 2.
    log2 = math.log(2)
    logprobs, reference = row(-2.0, -1.0), row(-2.0 + log2, -1.0 - log2)
    for estimator, want in {
        "k1": [-log2, log2],
        "k2": [log2**2 / 2, log2**2 / 2],
        "k3": [1 - log2, log2 - 0.5],
    }.items():
        got = kl_estimate(logprobs, reference, valid(logprobs), estimator)  # type: ignore[arg-type]
        assert got[0].tolist() == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_term_has_the_estimates_value_times_the_weight(estimator: KlEstimator, gradient: KlGradient) -> None:
    logprobs, reference = row(-2.0, -0.3, -4.0), row(-1.0, -0.9, -4.0)
    weight = row(0.5, 2.0, 3.0)
    value, _ = value_and_gradient(logprobs, reference, estimator, gradient, weight)
    estimate = kl_estimate(logprobs, reference, valid(logprobs), estimator)
    assert value == (estimate * (weight if gradient == "unbiased" else 1.0))[0].tolist()


def test_gradients_by_hand() -> None:
    # x = log 2: dk1 = 1, dk2 = -x, dk3 = 1 - e^x; unbiased adds k.
    log2 = math.log(2)
    logprobs, reference = row(-2.0), row(-2.0 + log2)
    for estimator, pathwise, k in (("k1", 1.0, -log2), ("k2", -log2, log2**2 / 2), ("k3", -1.0, 1 - log2)):
        _, got = value_and_gradient(logprobs, reference, estimator, "pathwise", row(7.0))  # type: ignore[arg-type]
        assert got == pytest.approx([pathwise], rel=1e-14)
        _, got = value_and_gradient(logprobs, reference, estimator, "unbiased", row(1.5))  # type: ignore[arg-type]
        assert got == pytest.approx([1.5 * (pathwise + k)], rel=1e-14)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(ESTIMATORS), st.floats(-9, 0), st.floats(-9, 0), st.floats(0, 3))
def test_unbiased_is_the_gradient_of_the_estimate_times_the_probability_ratio(
    estimator: KlEstimator, pi: float, reference: float, weight: float
) -> None:
    def frozen(now: float) -> float:
        x = reference - now
        k = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[estimator]
        return weight * k * math.exp(now - pi)

    h = 1e-5
    want = (frozen(pi + h) - frozen(pi - h)) / (2 * h)
    _, got = value_and_gradient(row(pi), row(reference), estimator, "unbiased", row(weight))
    # The differences lose digits to the size of e^x, the gradient does not.
    assert got[0] == pytest.approx(want, rel=1e-5, abs=1e-7 * math.exp(max(0.0, reference - pi)) + 1e-8)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_pathwise_equals_finite_differences(estimator: KlEstimator) -> None:
    logprobs = row(-2.0, -0.3, -4.0, -1.0, -6.0).requires_grad_()
    reference, mask = row(-1.0, -0.9, -4.0, -5.0, -1.5), torch.tensor([[True, True, False, True, True]])

    def term(x: Tensor) -> Tensor:
        return kl_term(x, reference, mask, estimator, "pathwise", torch.ones_like(x))

    assert torch.autograd.gradcheck(term, (logprobs,), eps=1e-6, atol=1e-7, rtol=1e-6)


def expectations(seed: int, estimator: KlEstimator, gradient: KlGradient, on_policy: bool) -> dict[str, Tensor]:
    """Mean value and mean gradient, in the logits, over tokens drawn from pi or from another policy."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=g, dtype=torch.float64).requires_grad_()
    reference = torch.log_softmax(torch.randn(6, generator=g, dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    drawn_from = logp.detach() if on_policy else torch.log_softmax(torch.randn(6, generator=g, dtype=torch.float64), 0)
    weight = torch.exp(logp.detach() - drawn_from)
    terms = kl_term(logp[None], reference[None], valid(logp[None]), estimator, gradient, weight[None])[0]
    mean = (drawn_from.exp() * terms).sum()
    p, r = logp.detach(), reference
    kl = (p.exp() * (p - r)).sum()
    second = (p.exp() * (p - r) ** 2 / 2).sum()
    return {
        "value": mean.detach(),
        "gradient": torch.autograd.grad(mean, logits)[0],
        "kl": kl,
        # d KL(pi || ref) / d logit_j = pi_j (log(pi_j / ref_j) - KL).
        "forward": p.exp() * (p - r - kl),
        # d KL(ref || pi) / d logit_j = pi_j - ref_j.
        "reverse": p.exp() - r.exp(),
        # d E[x^2 / 2] / d logit_j = pi_j (x_j^2 / 2 - E[x^2 / 2] + (p - r)_j - KL).
        "second": p.exp() * ((p - r) ** 2 / 2 - second + p - r - kl),
    }


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_k1_and_k3_have_the_kl_and_its_gradient_for_a_mean(
    estimator: KlEstimator, seed: int, on_policy: bool
) -> None:
    got = expectations(seed, estimator, "unbiased", on_policy)
    torch.testing.assert_close(got["value"], got["kl"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got["gradient"], got["forward"], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("on_policy", [True, False])
def test_unbiased_k2_has_the_gradient_of_its_own_biased_mean(on_policy: bool) -> None:
    got = expectations(1, "k2", "unbiased", on_policy)
    torch.testing.assert_close(got["gradient"], got["second"], rtol=1e-11, atol=1e-14)
    assert abs(float(got["value"] - got["kl"])) > 0.01


@pytest.mark.parametrize(("estimator", "mean"), [("k1", "zero"), ("k2", "forward"), ("k3", "reverse")])
@pytest.mark.parametrize("seed", range(3))
def test_pathwise_on_policy_means(seed: int, estimator: KlEstimator, mean: str) -> None:
    # k1 has no gradient on average, k2 that of KL(pi || ref), k3 that of KL(ref || pi).
    got = expectations(seed, estimator, "pathwise", on_policy=True)
    want = torch.zeros_like(got["gradient"]) if mean == "zero" else got[mean]
    torch.testing.assert_close(got["gradient"], want, rtol=1e-11, atol=1e-14)
    assert float((got["forward"] - got["reverse"]).abs().max()) > 0.01


def test_beyond_the_clamp_the_pull_to_the_reference_survives() -> None:
    # x = 200 and -200, both held at 20: minimising has to raise pi in the first, lower it in the second.
    logprobs, reference = row(-201.0, -1.0), row(-1.0, -201.0)
    value, slope = value_and_gradient(logprobs, reference, "k3", "unbiased", row(0.5, 0.5))
    assert value == pytest.approx([0.5 * (math.exp(20) - 21), 0.5 * (math.exp(-20) + 19)], rel=1e-13)
    assert slope == [-10.0, 10.0]
    assert value_and_gradient(logprobs, reference, "k1", "unbiased") == ([-20.0, 20.0], [-19.0, 21.0])
    assert value_and_gradient(logprobs, reference, "k2", "unbiased") == ([200.0, 200.0], [180.0, 220.0])
    for estimator in ESTIMATORS:
        assert value_and_gradient(logprobs, reference, estimator, "pathwise")[1] == [0.0, 0.0]


def test_fp32_keeps_the_unbiased_k3_gradient_where_its_parts_are_large() -> None:
    # k3 and its derivative are about +-220000 here, an ulp of which is 1/64; their sum is -12.3.
    leaf = torch.tensor([[-13.3]], requires_grad=True)
    term = kl_term(leaf, torch.tensor([[-1.0]]), valid(leaf), "k3", "unbiased", torch.ones(1, 1))
    term.sum().backward()
    assert term.dtype == torch.float32 and leaf.grad is not None
    assert leaf.grad.item() == pytest.approx(-12.3, rel=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e300, -200.0])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_positions_may_hold_anything(estimator: KlEstimator, gradient: KlGradient, poison: float) -> None:
    leaf = row(-1.0, poison, poison, -2.0).requires_grad_()
    reference, weight = row(-2.0, poison, -1.0, -1.5), row(1.0, poison, 1.0, 2.0)
    mask = torch.tensor([[True, False, False, True]])
    term = kl_term(leaf, reference, mask, estimator, gradient, weight)
    term.sum().backward()
    assert leaf.grad is not None
    want, slope = value_and_gradient(row(-1.0, -2.0), row(-2.0, -1.5), estimator, gradient, row(1.0, 2.0))
    assert term[0].tolist() == [want[0], 0.0, 0.0, want[1]]
    assert leaf.grad[0].tolist() == [slope[0], 0.0, 0.0, slope[1]]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_neither_the_reference_nor_the_weight_is_differentiated(gradient: KlGradient) -> None:
    leaf, reference, weight = (row(x).requires_grad_() for x in (-1.0, -2.0, 1.5))
    kl_term(leaf, reference, valid(leaf), "k3", gradient, weight).sum().backward()
    assert leaf.grad is not None and reference.grad is None and weight.grad is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0)), min_size=1, max_size=6),
    st.sampled_from(ESTIMATORS),
    st.sampled_from(GRADIENTS),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_finite_for_any_finite_log_probabilities(
    pairs: list[tuple[float, float]], estimator: KlEstimator, gradient: KlGradient, dtype: torch.dtype
) -> None:
    pi, ref = (torch.tensor([list(side)], dtype=dtype) for side in zip(*pairs, strict=True))
    value, slope = value_and_gradient(pi, ref, estimator, gradient, torch.full_like(pi, 4.8e8))
    assert np.isfinite(value).all() and np.isfinite(slope).all()
    if estimator != "k1":
        assert min(value) >= 0
