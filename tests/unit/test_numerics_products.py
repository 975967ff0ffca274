"""Products of token ratios: how they shrink with length, and the warning that says so."""

from __future__ import annotations

import math

import pytest

from tasks.numerics.correction import (
    Correction,
    product_shrinkage,
    product_warning,
)
from tasks.numerics.rejection import RejectionRule
from tests.unit.correction_support import padded, weighting


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
