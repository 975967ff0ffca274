"""How far the trainer's probabilities are from the rollout engine's, token by token.

Notation, the same everywhere: q = log-probability of a sampled token when it was sampled, p = its
log-probability scored by the trainer at the weights that generated it, d = p - q. All statistics run
over valid tokens (response tokens; prompt and padding excluded) in fp64. d is clamped to +-20 before
any exponential and the clamped tokens are counted; metrics of |d| use the unclamped values. A missing
or non-finite q counts as d = 0 and is reported. An empty selection gives 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CLAMP = 20.0
"""Bound on |d| before an exponential: e^20 is 4.9e8."""


class NonFiniteScoreError(ValueError):
    """The trainer scored a valid token as NaN or inf: its weights are broken, no metric may hide that."""


@dataclass(frozen=True)
class LogRatios:
    """Valid tokens of a batch, flattened.

    `d` unclamped and `clamped` (to +-20), `p`, `q` (q = p where missing): fp64 `[tokens]`. `missing` counts
    rollout log-probabilities that were absent or non-finite.
    """

    d: Tensor
    clamped: Tensor
    p: Tensor
    q: Tensor
    missing: int


def log_ratios(p: Tensor, q: Tensor, mask: Tensor) -> LogRatios:
    """Select valid tokens and form d = p - q. `p`, `q`, `mask` (bool) share one shape.

    Raises `NonFiniteScoreError` for a non-finite p at a valid token.
    """
    p, q = p[mask].to(torch.float64), q[mask].to(torch.float64)
    if not bool(torch.isfinite(p).all()):
        raise NonFiniteScoreError(f"{int((~torch.isfinite(p)).sum())} scored log-probabilities are not finite")
    absent = ~torch.isfinite(q)
    q = torch.where(absent, p, q)
    d = p - q
    return LogRatios(d, d.clamp(-CLAMP, CLAMP), p, q, int(absent.sum()))


def k3(x: Tensor) -> Tensor:
    """e^x - 1 - x >= 0, the low-variance KL estimator (Schulman, 2020), to a few ulp for every x."""
    # Near 0 the difference cancels (in fp32 it is 0 below 1e-7), so there the Taylor series is summed:
    # x^2/2 (1 + x/3 (1 + x/4 (...))); at |x| < 0.25 the terms beyond x^13 are below the fp64 epsilon.
    series = torch.ones_like(x)
    for n in range(13, 2, -1):
        series = 1 + series * x / n
    return torch.where(x.abs() < 0.25, series * x * x / 2, torch.expm1(x) - x)


def js_terms(p: Tensor, q: Tensor) -> Tensor:
    """Per-token Jensen-Shannon estimate: mean of k3(p - m) and k3(q - m), m = log of the 50/50 mixture.

    Both differences depend on d = p - q alone (clamped to +-20): m - p = log((1 + e^-d) / 2).
    """
    d = (p - q).clamp(-CLAMP, CLAMP)
    return 0.5 * (k3(-torch.log1p(torch.expm1(-d) / 2)) + k3(-torch.log1p(torch.expm1(d) / 2)))


def _mean(x: Tensor) -> float:
    return float(x.mean()) if x.numel() else 0.0


def nearest_rank(x: Tensor, share: float) -> float:
    """The smallest value with at least `share` (0, 1] of the values at or below it; 0 when empty."""
    if not x.numel():
        return 0.0
    # 99.9 / 100 * 1000 is 999.0000000000001 in floating point: the rank must still be 999.
    rank = max(1, math.ceil(round(share * x.numel(), 6)))
    return float(torch.kthvalue(x, rank).values)


def mismatch_metrics(ratios: LogRatios) -> dict[str, float]:
    """The `mismatch/*` metrics of one batch (names and formulas: README, table of metrics)."""
    d, clamped = ratios.d, ratios.clamped
    return {
        "mismatch/token_mult_prob_error": _mean(torch.exp(clamped.abs())),
        "mismatch/gen_kl": _mean(k3(clamped)),
        "mismatch/policy_kl": _mean(k3(-clamped)),
        "mismatch/js": _mean(js_terms(ratios.p, ratios.q)),
        "mismatch/max_abs_logprob_diff": float(d.abs().max()) if d.numel() else 0.0,
        "mismatch/p99_abs_logprob_diff": nearest_rank(d.abs(), 0.99),
        "mismatch/clamped_tokens": float((d.abs() > CLAMP).sum()),
        "mismatch/missing_rollout_logprobs": float(ratios.missing),
    }
