"""Weights, rejection and self-normalisation of one update, against hand-worked values and plain Python."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tasks.numerics.correction import (
    Correction,
    Weighting,
    correct,
    product_shrinkage,
)
from tasks.numerics.mismatch import NonFiniteScoreError
from tasks.numerics.rejection import RejectionRule
from tests.unit.correction_support import LEVELS, PLAIN, close, metric, run, weighting, weights

D = [[0.5, -0.1, 0.2], [-0.4], [], [3.0, 0.0]]


def test_raw_weights_of_each_level() -> None:
    assert weights(D, weighting("none")) == [[1.0] * 3, [1.0], [], [1.0] * 2]
    token = weights(D, weighting("token", **PLAIN))
    for got, d in zip(token, D, strict=True):
        assert got == close([math.exp(x) for x in d])
    sequence = weights(D, weighting("sequence", **PLAIN))
    geometric = weights(D, weighting("geometric", **PLAIN))
    for i, (product, mean) in {0: (0.6, 0.2), 1: (-0.4, -0.4), 3: (3.0, 1.5)}.items():
        assert sequence[i] == close([math.exp(product)] * len(D[i]))
        assert geometric[i] == close([math.exp(mean)] * len(D[i]))


def test_truncation_at_both_ends_on_train_over_rollout() -> None:
    band = {"lower": 0.6, "upper": 1.4}
    # The inverse reading of 0.6..1.4 would cut at 0.714 and 1.667.
    d = [[math.log(r) for r in (0.5, 0.65, 1.0, 1.35, 1.6)]]
    assert weights(d, weighting("token", **band))[0] == close([0.6, 0.65, 1.0, 1.35, 1.4])
    product = [[math.log(0.5), 0.0], [math.log(1.6), 0.0], [math.log(0.65), 0.0]]
    assert weights(product, weighting("sequence", **band)) == [close([w] * 2) for w in (0.6, 1.4, 0.65)]
    assert weights(product, weighting("geometric", **band)) == [close([w] * 2) for w in (0.5**0.5, 1.6**0.5, 0.65**0.5)]
    assert weights(product, weighting("geometric", lower=0.75, upper=1.2)) == [
        close([w] * 2) for w in (0.75, 1.2, 0.65**0.5)
    ]


def test_masking_keeps_raw_weights_inside_and_rejects_outside() -> None:
    band = {"lower": 0.6, "upper": 1.4, "outside": "mask"}
    d = [[math.log(r) for r in (0.59, 0.61, 0.7, 1.0, 1.39, 1.41, 1.5)]]
    out = run(d, Correction(weighting("token", **band)))
    assert out.weights[0].tolist() == close([0.0, 0.61, 0.7, 1.0, 1.39, 0.0, 0.0])
    assert out.kept[0].tolist() == [False, True, True, True, True, False, False]
    assert metric(out, "rejected_fraction") == pytest.approx(3 / 7)
    assert weights([[0.4, 0.4], [0.4]], weighting("sequence", **band)) == [[0.0, 0.0], [0.0]]
    assert weights([[0.2, 0.2], [0.2]], weighting("sequence", **band)) == [[0.0, 0.0], close([math.exp(0.2)])]
    assert weights([[0.2, 0.4], [0.2, 0.6]], weighting("geometric", **band)) == [close([math.exp(0.3)] * 2), [0.0] * 2]


def test_a_mask_with_one_bound() -> None:
    d = [[math.log(r) for r in (1e-6, 0.4, 3.0)]]
    assert weights(d, weighting("token", outside="mask"))[0] == close([1e-6, 0.4, 0.0])
    assert weights(d, weighting("token", lower=0.5, upper=None, outside="mask"))[0] == close([0.0, 0.0, 3.0])


def test_a_mask_bound_is_inside() -> None:
    low, high = math.log(0.5), math.log(5.0)
    values = torch.tensor([[low, math.nextafter(low, -1), high, math.nextafter(high, 9)]], dtype=torch.float64)
    band = Correction(weighting("token", lower=0.5, upper=5.0, outside="mask"))
    mask = torch.ones_like(values, dtype=torch.bool)
    assert correct(values, values * 0, mask, torch.ones(1), band).kept.tolist() == [[True, False, True, False]]


def test_long_response_with_a_small_constant_difference() -> None:
    d = [[-1e-3] * 8192]
    for level, want in (("sequence", 2.768596e-4), ("geometric", 0.9990005), ("token", 0.9990005)):
        out = run(d, Correction(weighting(level)))
        assert metric(out, "weight_mean") == pytest.approx(want, rel=1e-6), level
        assert bool((out.weights == out.weights[0, 0]).all())


def test_differences_up_to_200_are_clamped_before_the_exponential() -> None:
    e20 = math.exp(20)
    d = [[200.0, -200.0], [200.0, -10.0], [200.0, 200.0], [-200.0, -200.0], [200.0, 0.0]]
    for got, row in zip(weights(d, weighting("token", **PLAIN)), d, strict=True):
        assert got == close([math.exp(max(-20.0, min(20.0, x))) for x in row])
    sequence = weights(d, weighting("sequence", **PLAIN))
    assert sequence == [close([w] * 2) for w in (1.0, math.exp(10), e20, 1 / e20, e20)]
    geometric = weights(d, weighting("geometric", **PLAIN))
    assert geometric == [close([w] * 2) for w in (1.0, math.exp(5), e20, 1 / e20, math.exp(10))]
    assert weights(d, weighting("sequence")) == [close([w] * 2) for w in (1.0, 2.0, 2.0, 1 / e20, 2.0)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("self_normalize", [False, True])
def test_masked_values_are_never_seen(level: str, self_normalize: bool) -> None:
    junk = [math.nan, math.inf, -math.inf, 200.0, -200.0, -1.0]
    p = torch.tensor([[*junk, -1.0, -1.5], [*junk, -1.0, -1.0]], dtype=torch.float64)
    q = torch.tensor([[*reversed(junk), -1.25, -1.25], [*reversed(junk), -0.75, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[False] * 6 + [True, True], [False] * 7 + [True]])
    rule = RejectionRule("k3", "sequence_max", upper=0.04)
    correction = Correction(weighting(level), (rule,), self_normalize)
    got = correct(p, q, mask, torch.ones(2), correction)
    alone = run([[0.25, -0.25], [0.0]], correction)
    assert torch.equal(got.weights[:, 6:].sort(dim=1).values, alone.weights.sort(dim=1).values)
    assert not bool(got.weights[:, :6].any()) and not bool(got.weights[1, 6])
    assert got.metrics == pytest.approx(alone.metrics, rel=1e-12) and int(got.kept.sum()) == 3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_a_missing_rollout_logprob_counts_as_no_difference(level: str, outside: str) -> None:
    p = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
    q = torch.tensor([[math.nan, math.inf, -math.inf], [math.nan, -1.25, -1.25]])
    one = Correction(weighting(level, lower=0.999, upper=1.3, outside=outside))
    out = correct(p, q, torch.ones(2, 3, dtype=torch.bool), torch.ones(2), one)
    assert out.weights[0].tolist() == [1.0] * 3
    far = {"truncate": 1.3, "mask": 0.0}[outside]
    want = {
        "none": [1.0] * 3,
        "token": [1.0, math.exp(0.25), math.exp(0.25)],
        "sequence": [far] * 3,
        "geometric": [math.exp(0.5 / 3)] * 3,
    }
    assert out.weights[1].tolist() == close(want[level])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_a_batch_without_valid_tokens_gives_zeros(level: str, shape: tuple[int, int]) -> None:
    rules = (RejectionRule("k1", "sequence_mean", 0.5, 2.0), RejectionRule("k3", "token", upper=1.0))
    nothing = torch.zeros(shape, dtype=torch.bool)
    p = torch.full(shape, math.nan)
    out = correct(p, p, nothing, torch.zeros(shape[0]), Correction(weighting(level), rules, self_normalize=True))
    assert torch.equal(out.weights, torch.zeros(shape)) and torch.equal(out.kept, nothing)
    assert set(out.metrics.values()) == {0.0}
    assert set(product_shrinkage(p, p, nothing).values()) == {0.0}


@pytest.mark.parametrize("self_normalize", [False, True])
def test_nothing_kept_gives_zeros(self_normalize: bool) -> None:
    for level in LEVELS:
        far = Correction(weighting(level), (RejectionRule("k1", "token", 0.99, 1.01),), self_normalize)
        out = run([[1.0, -1.0], [2.0]], far)
        assert not bool(out.weights.any()) and not bool(out.kept.any())
        assert metric(out, "rejected_fraction") == metric(out, "rejected_sequences_fraction") == 1.0
        assert metric(out, "weight_mean") == 0.0
        assert out.metrics.get("importance/self_normalizer", 0.0) == 0.0


def test_rules_are_all_required_and_counted_each() -> None:
    d = [[0.0, 1.0, -1.0, 0.1], [0.4, 0.4], [0.0], []]
    rules = (
        RejectionRule("k1", "token", 0.5, 2.0),
        RejectionRule("k1", "token", None, 1.05),
        RejectionRule("k2", "sequence_mean", upper=0.25),
        RejectionRule("k1", "token", 0.9, None, "negative"),
    )
    out = run(d, Correction(weighting("token", **PLAIN), rules), [1.0, 1.0, -1.0, 1.0])
    # Of 7 valid tokens: 2; 4; the 4 of the first sequence, whose mean of d^2/2 is 1.005/4; none.
    assert out.kept.tolist() == [[False] * 4, [False] * 4, [True, False, False, False], [False] * 4]
    assert out.metrics == {
        "importance/rejected_fraction": pytest.approx(6 / 7),
        "importance/rejected_sequences_fraction": pytest.approx(2 / 3),
        "importance/rejected_fraction_k1_token": pytest.approx(2 / 7),
        "importance/rejected_fraction_k1_token_2": pytest.approx(4 / 7),
        "importance/rejected_fraction_k2_sequence_mean": pytest.approx(4 / 7),
        "importance/rejected_fraction_k1_token_3": 0.0,
        "importance/weight_mean": pytest.approx(1 / 7),
    }
    assert out.weights.tolist() == [[0.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0] * 4]


def test_no_metric_is_also_the_folder_of_another() -> None:
    rules = tuple(RejectionRule("k1", level, 0.5, 2.0) for level in ("token", "token", "sequence_max"))
    names = run(D, Correction(weighting("token"), rules, self_normalize=True)).metrics
    assert not [pair for pair in itertools.permutations(names, 2) if pair[1].startswith(pair[0] + "/")]


def test_a_sequence_mask_over_token_weights() -> None:
    # Geometric mean in [0.999, 1.002], token weights cut at 2.
    rules = (RejectionRule("k1", "sequence_mean", 0.999, 1.002),)
    d = [[0.8, -0.8], [0.01, 0.0], [-0.5, 0.501]]
    got = weights(d, Correction(weighting("token"), rules))
    assert got == [close([2.0, math.exp(-0.8)]), [0.0, 0.0], close([math.exp(-0.5), math.exp(0.501)])]


def test_self_normalisation_over_kept_tokens() -> None:
    d = [[math.log(r) for r in (0.5, 1.5, 4.0)], [math.log(1.0)]]
    out = run(d, Correction(weighting("token"), (), self_normalize=True))
    mean = (0.5 + 1.5 + 2.0 + 1.0) / 4  # after truncation at 2
    assert metric(out, "self_normalizer") == pytest.approx(mean) and metric(out, "weight_mean") == pytest.approx(1.0)
    assert out.weights[0].tolist() == close([0.5 / mean, 1.5 / mean, 2.0 / mean])
    rejecting = run(d, Correction(weighting("token"), (RejectionRule("k1", "token", upper=2.0),), self_normalize=True))
    assert metric(rejecting, "self_normalizer") == pytest.approx((0.5 + 1.5 + 1.0) / 3)
    assert rejecting.weights[0].tolist() == close([0.5, 1.5, 0.0]) and rejecting.weights[1, 0] == 1.0
    assert metric(rejecting, "weight_mean") == pytest.approx(3 / 4)


@pytest.mark.parametrize(("level", "first"), [("sequence", 1.5), ("geometric", 1.5 ** (1 / 3))])
def test_self_normalisation_over_kept_sequences_counts_each_once(level: str, first: float) -> None:
    # Lengths 3 and 1: over tokens the mean would be (3 first + 0.5)/4.
    d = [[math.log(1.5), 0.0, 0.0], [math.log(0.5)], []]
    out = run(d, Correction(weighting(level), (), self_normalize=True))
    mean = (first + 0.5) / 2
    assert metric(out, "self_normalizer") == pytest.approx(mean)
    assert out.weights.tolist() == [close([first / mean] * 3), close([0.5 / mean, 0.0, 0.0]), [0.0] * 3]
    # A token rule takes one token of the first sequence, which still counts once with its own weight.
    partly = run(d, Correction(weighting(level), (RejectionRule("k1", "token", upper=1.2),), self_normalize=True))
    assert metric(partly, "self_normalizer") == pytest.approx(mean)
    assert partly.weights[0].tolist() == close([0.0, first / mean, first / mean])
    # A sequence rule takes it out of the mean.
    without = run(d, Correction(weighting(level), (RejectionRule("k1", "sequence_max", upper=1.2),), True))
    assert metric(without, "self_normalizer") == pytest.approx(0.5) and without.weights[1, 0] == 1.0


def test_self_normalisation_without_weights_is_one() -> None:
    out = run(D, Correction(weighting("none"), (RejectionRule("k1", "token", upper=2.0),), self_normalize=True))
    assert metric(out, "self_normalizer") == 1.0 and out.weights[out.kept].tolist() == [1.0] * 5


def test_outputs_carry_no_gradient() -> None:
    p = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    q = torch.tensor([[-1.5, -1.75]], requires_grad=True)
    mask = torch.tensor([[True, True]])
    for level in LEVELS:
        rules = (RejectionRule("probability", "token", -0.9, 0.9),)
        out = correct(p, q, mask, torch.ones(1), Correction(weighting(level), rules, self_normalize=True))
        assert not out.weights.requires_grad and out.kept.tolist() == [[True, True]]
        (slope,) = torch.autograd.grad((out.weights * p).sum(), p)
        assert torch.equal(slope, out.weights)


def test_exponentials_are_taken_in_fp64() -> None:
    p, q = torch.tensor([[-1.0]]), torch.tensor([[-1.3]])
    want = math.exp(float(p.double() - q.double()))
    got = correct(p, q, torch.tensor([[True]]), torch.ones(1), Correction(weighting("sequence")))
    assert float(got.weights) == float(torch.tensor(want, dtype=torch.float32))


def test_broken_scores_and_shapes_are_errors() -> None:
    mask = torch.tensor([[True, False]])
    q, one = torch.tensor([[-1.0, -1.0]]), Correction(weighting("token"))
    with pytest.raises(NonFiniteScoreError):
        correct(torch.tensor([[math.nan, -1.0]]), q, mask, torch.ones(1), one)
    assert correct(torch.tensor([[-1.0, math.nan]]), q, mask, torch.ones(1), one).weights.tolist() == [[1.0, 0.0]]
    with pytest.raises(ValueError, match="must be"):
        correct(q, q[:, :1], mask, torch.ones(1), one)
    with pytest.raises(ValueError, match="one a sequence"):
        correct(q, q, mask, torch.ones(2), Correction(weighting("token"), (RejectionRule("k2", "token", upper=1.0),)))


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"level": "product"}, "level", "'product'"),
        ({"level": "token", "outside": "drop"}, "outside", "'drop'"),
        ({"level": "token", "lower": -0.1}, "lower", "-0.1"),
        ({"level": "token", "lower": 1.0}, "lower", "1.0"),
        ({"level": "token", "lower": math.nan}, "lower", "nan"),
        ({"level": "sequence", "upper": 1.0}, "upper", "1.0"),
        ({"level": "sequence", "upper": math.inf}, "upper", "inf"),
        ({"level": "geometric", "upper": None, "outside": "mask"}, "upper", "None"),
    ],
)
def test_senseless_weightings_are_refused_by_field_and_value(fields: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value}; allowed: "):
        Weighting(**fields)
