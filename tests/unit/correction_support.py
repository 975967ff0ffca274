"""Batches, weightings and rules for the tests of corrections."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.numerics.correction import (
    Correction,
    CorrectionOutputs,
    Weighting,
    correct,
)
from tasks.numerics.rejection import RejectionRule

PLAIN = {"lower": 0.0, "upper": None}
LEVELS = ("none", "token", "sequence", "geometric")
Bound = float | None


def padded(rows: list[list[float]], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Values fp64 with NaN in the padding, and the mask."""
    width = max(map(len, rows), default=0) if width is None else width
    values = torch.full((len(rows), width), math.nan, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[i, : len(row)] = True
    return values, mask


def weighting(level: str, **fields: Any) -> Weighting:
    return Weighting(**({"level": level} | fields))


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


def rule(statistic: str, level: str, lower: Bound, upper: Bound, advantages: str = "any") -> RejectionRule:
    fields: dict[str, Any] = {"statistic": statistic, "level": level, "advantages": advantages}
    return RejectionRule(lower=lower, upper=upper, **fields)


def metric(out: CorrectionOutputs, name: str) -> float:
    return out.metrics[f"importance/{name}"]
