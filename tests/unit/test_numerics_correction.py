"""Weights, rejection and self-normalisation of one update, against hand-worked values and plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.numerics.correction import (
    Correction,
    CorrectionOutputs,
    Weighting,
    correct,
    product_shrinkage,
    product_warning,
)
from tasks.numerics.mismatch import NonFiniteScoreError
from tasks.numerics.rejection import RejectionRule

PLAIN = {"lower": 0.0, "upper": None}
LEVELS = ("none", "token", "sequence", "geometric")


def weighting(level: str, **fields: Any) -> Weighting:
    return Weighting(**({"level": level} | fields))


def padded(rows: list[list[float]], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Values fp64 with NaN in the padding, and the mask."""
    width = max(map(len, rows), default=0) if width is None else width
    values = torch.full((len(rows), width), math.nan, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[i, : len(row)] = True
    return values, mask


def run(d: list[list[float]], correction: Correction, advantages: list[float] | None = None) -> CorrectionOutputs:
    values, mask = padded(d)
    signs = torch.tensor(advantages or [1.0] * len(d))
    return correct(values - 1.0, torch.where(mask, -1.0, values), mask, signs, correction)


def weights(d: list[list[float]], correction: Correction | Weighting) -> list[list[float]]:
    """Weights without the padding, which must weigh exactly 0."""
    out = run(d, correction if isinstance(correction, Correction) else Correction(correction))
    assert out.weights.dtype == torch.float32 and not bool(torch.isnan(out.weights).any())
    assert all(not bool(row[len(given) :].any()) for row, given in zip(out.weights, d, strict=True))
    return [row[: len(given)].tolist() for row, given in zip(out.weights, d, strict=True)]


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-6)


def metric(out: CorrectionOutputs, name: str) -> float:
    return out.metrics[f"importance/{name}"]


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


# Shrinkage of products with length.


def shrinkage(d: list[list[float]]) -> dict[str, float]:
    values, mask = padded(d)
    return product_shrinkage(values, values * 0, mask)


def test_shrinkage_by_hand() -> None:
    d = [[0.1, 0.3], [-1.0], [0.5, 0.5, 0.5], [], [0.0]]
    got = shrinkage(d)
    # Geometric means e^0.2, e^-1, e^0.5, 1: the middle two are 1 and e^0.2.
    assert got["importance/sequence_geometric_median"] == pytest.approx((1 + math.exp(0.2)) / 2)
    # Products e^0.4, e^-1, e^1.5, 1: the middle two are 1 and e^0.4.
    assert got["importance/sequence_product_median"] == pytest.approx((1 + math.exp(0.4)) / 2)
    assert shrinkage(d[:3])["importance/sequence_product_median"] == pytest.approx(math.exp(0.4))
    assert shrinkage([[200.0] * 3])["importance/sequence_product_median"] == pytest.approx(math.exp(20))


LONG = {"importance/sequence_geometric_median": 0.9990005, "importance/sequence_product_median": 2.77e-4}


def test_one_bad_sequence_hides_no_warning() -> None:
    metrics = shrinkage([[-1e-3] * 2048] * 20 + [[3.0] * 2048])
    assert metrics["importance/sequence_geometric_median"] == pytest.approx(math.exp(-1e-3))
    assert product_warning(metrics, Correction(weighting("sequence"))) is not None


def test_the_warning_names_both_values_and_the_remedy() -> None:
    metrics = shrinkage([[-1e-3] * 8192] * 2)
    text = product_warning(metrics, Correction(weighting("sequence")))
    assert text is not None and "0.999" in text and "0.000277" in text and "geometric or token" in text


def test_the_warning_is_for_products_only() -> None:
    product = RejectionRule("k1", "sequence_sum", 0.5, 2.0)
    assert product_warning(LONG, Correction(weighting("token"), (product,))) is not None
    assert product_warning(LONG, Correction(weighting("sequence"))) is not None
    others = (RejectionRule("k1", "sequence_mean", 0.5, 2.0), RejectionRule("k3", "sequence_sum", upper=2.0))
    for level in ("none", "token", "geometric"):
        assert product_warning(LONG, Correction(weighting(level), others)) is None


@pytest.mark.parametrize(
    ("geometric", "product", "warns"),
    [
        (1.0, 0.49, True),
        (1.0, 2.01, True),
        (1.0, 0.5, False),
        (1.0, 2.0, False),
        (0.9, 0.1, True),
        (1.1, 9.0, True),
        (0.89, 0.1, False),
        (1.11, 9.0, False),
        (0.0, 0.0, False),
    ],
)
def test_the_limits_of_the_warning(geometric: float, product: float, warns: bool) -> None:
    metrics = {"importance/sequence_geometric_median": geometric, "importance/sequence_product_median": product}
    assert (product_warning(metrics, Correction(weighting("sequence"))) is not None) == warns


# Properties.


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-4, 4), st.floats(-2, 2)), min_size=2, max_size=4))
def test_plain_weights_are_unbiased_over_an_enumerated_vocabulary(logits: list[tuple[float, float]]) -> None:
    # All responses of two tokens: their Q-weighted mean of w f is the P-weighted mean of f.
    q1 = torch.log_softmax(torch.tensor([a for a, _ in logits], dtype=torch.float64), 0).tolist()
    p1 = torch.log_softmax(torch.tensor([a + b for a, b in logits], dtype=torch.float64), 0).tolist()
    pairs = list(itertools.product(range(len(logits)), repeat=2))
    p = torch.tensor([[p1[i], p1[j]] for i, j in pairs], dtype=torch.float64)
    q = torch.tensor([[q1[i], q1[j]] for i, j in pairs], dtype=torch.float64)
    value = torch.tensor([i + 3.0 * j * j for i, j in pairs], dtype=torch.float64)
    mask = torch.ones(len(pairs), 2, dtype=torch.bool)
    chance, want = q.sum(1).exp(), float((p.sum(1).exp() * value).sum())
    whole = correct(p, q, mask, torch.ones(len(pairs)), Correction(weighting("sequence", **PLAIN))).weights.double()
    assert float((chance * whole[:, 0] * value).sum()) == pytest.approx(want, rel=1e-5)
    token = correct(p, q, mask, torch.ones(len(pairs)), Correction(weighting("token", **PLAIN))).weights.double()
    first = torch.tensor([float(i) for i, _ in pairs], dtype=torch.float64)
    assert float((chance * token[:, 0] * first).sum()) == pytest.approx(
        sum(math.exp(x) * i for i, x in enumerate(p1)), rel=1e-5
    )


batches = st.lists(st.lists(st.floats(-200, 200) | st.floats(-2, 2), max_size=6), min_size=1, max_size=4)


@st.composite
def corrections(draw: st.DrawFn) -> Correction:
    lower, upper = draw(st.floats(0.01, 0.9)), draw(st.floats(1.1, 50.0))
    outside = draw(st.sampled_from(["truncate", "mask"]))
    rules = draw(
        st.lists(
            st.sampled_from(
                [
                    RejectionRule("k1", "token", 0.2, 3.0),
                    RejectionRule("k1", "sequence_mean", 0.5, 2.0, "positive"),
                    RejectionRule("k1", "sequence_sum", 0.1, None),
                    RejectionRule("k2", "sequence_max", upper=2.0),
                    RejectionRule("k3", "sequence_mean", upper=1.0, advantages="negative"),
                ]
            ),
            max_size=3,
        )
    )
    level = draw(st.sampled_from(LEVELS))
    return Correction(weighting(level, lower=lower, upper=upper, outside=outside), tuple(rules), draw(st.booleans()))


def by_definition(d: list[list[float]], w: Weighting) -> list[list[float]]:
    def clamp(x: float) -> float:
        return max(-20.0, min(20.0, x))

    result = []
    for row in d:
        c = [clamp(x) for x in row]
        log_w = {
            "none": [0.0 for _ in c],
            "token": c,
            "sequence": [clamp(math.fsum(c))] * len(c),
            "geometric": [math.fsum(c) / max(1, len(c))] * len(c),
        }[w.level]
        result.append([math.exp(x) for x in log_w])
    assert w.upper is not None
    if w.outside == "truncate":
        return [[min(max(x, w.lower), w.upper) for x in row] for row in result]
    return [[x if w.lower <= x <= w.upper else 0.0 for x in row] for row in result]


@settings(max_examples=100, deadline=None)
@given(batches, corrections())
def test_weights_are_their_definition(d: list[list[float]], correction: Correction) -> None:
    plain = dataclasses.replace(correction, rejection=(), self_normalize=False)
    w = plain.weighting
    for got, want in zip(weights(d, plain), by_definition(d, w), strict=True):
        for a, b in zip(got, want, strict=True):
            at_bound = any(max(a, b) == pytest.approx(x, rel=1e-6) for x in (w.lower, w.upper))
            assert a == pytest.approx(b, rel=1e-6) or (w.outside == "mask" and at_bound)


@settings(max_examples=100, deadline=None)
@given(batches, corrections())
def test_invariants(d: list[list[float]], correction: Correction) -> None:
    advantages = [1.0, -1.0, 0.0, 2.0][: len(d)]
    out = run(d, correction, advantages)
    _, mask = padded(d)
    assert torch.equal(out.weights > 0, out.kept) and not bool((out.kept & ~mask).any())
    assert bool(torch.isfinite(out.weights).all()) and all(math.isfinite(v) for v in out.metrics.values())
    tokens = int(mask.sum())
    assert metric(out, "rejected_fraction") == pytest.approx(int((mask & ~out.kept).sum()) / max(1, tokens))
    assert metric(out, "weight_mean") == pytest.approx(float(out.weights.double().sum()) / max(1, tokens), rel=1e-5)
    kept_weights = out.weights[out.kept].double()
    if not correction.self_normalize:
        w = correction.weighting
        slack = 1e-6
        assert bool((kept_weights >= w.lower * (1 - slack)).all())
        assert w.upper is not None and bool((kept_weights <= w.upper * (1 + slack)).all())
    elif kept_weights.numel():
        if correction.weighting.level in ("none", "token"):
            mean = float(kept_weights.mean())
        else:
            rows = [float(row[row > 0].double().mean()) for row in out.weights if bool((row > 0).any())]
            mean = sum(rows) / len(rows)
        assert mean == pytest.approx(1.0, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(batches, corrections())
def test_the_order_of_rules_does_not_matter(d: list[list[float]], correction: Correction) -> None:
    turned = dataclasses.replace(correction, rejection=correction.rejection[::-1])
    assert torch.equal(run(d, correction).weights, run(d, turned).weights)


@settings(max_examples=50, deadline=None)
@given(batches, st.floats(0.01, 0.9), st.floats(1.1, 50.0))
def test_a_masked_weight_and_a_k1_rule_are_one_decision(d: list[list[float]], lower: float, upper: float) -> None:
    d = [[max(-20.0, min(20.0, x)) for x in row] for row in d]
    for level, rule_level in (("token", "token"), ("sequence", "sequence_sum"), ("geometric", "sequence_mean")):
        masking = run(d, Correction(weighting(level, lower=lower, upper=upper, outside="mask")))
        fields: dict[str, Any] = {"statistic": "k1", "level": rule_level}
        rule = RejectionRule(lower=lower, upper=upper, **fields)
        assert torch.equal(masking.kept, run(d, Correction(weighting(level, **PLAIN), (rule,))).kept)
        assert torch.equal(masking.weights, run(d, Correction(weighting(level, **PLAIN), (rule,))).weights)
