"""Corrections of arbitrary batches, against their definition in plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.numerics.correction import (
    Correction,
    Weighting,
    correct,
)
from tasks.numerics.rejection import RejectionRule
from tests.unit.correction_support import LEVELS, PLAIN, metric, padded, run, weighting, weights


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
