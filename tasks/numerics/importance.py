"""Importance weights that correct the rollout engine's distribution to the trainer's.

w = e^d with d = p - q (train over rollout, see `tasks.numerics.mismatch`). Weights are detached: they
correct the sampling distribution and carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.numerics.mismatch import CLAMP, LogRatios


@dataclass(frozen=True)
class TokenTruncation:
    """w = min(e^d, cap) for each token (truncated importance sampling; Ionides, 2008; Yao et al., 2025).

    Truncation keeps a token in the loss's denominator.
    """

    cap: float


@dataclass(frozen=True)
class NoCorrection:
    """w = 1. Metrics are still reported, against a cap of 2."""

    cap: float = 2.0


Correction = TokenTruncation | NoCorrection


def token_weights(p: Tensor, q: Tensor, mask: Tensor, correction: Correction) -> Tensor:
    """Weight of each token, fp32, shape of `p`; exactly 0 where `mask` is false, 1 where q is missing."""
    d = torch.where(mask & torch.isfinite(q), p.to(torch.float64) - q.to(torch.float64), 0.0)
    raw = torch.exp(d.clamp(-CLAMP, CLAMP))
    weights = raw.clamp(max=correction.cap) if isinstance(correction, TokenTruncation) else torch.ones_like(raw)
    return torch.where(mask, weights, 0.0).to(torch.float32).detach()


def importance_metrics(ratios: LogRatios, cap: float) -> dict[str, float]:
    """`importance/*` of one batch, from the raw weights except `truncated_mean`.

    Effective sample size as a share: (sum w)^2 / (N sum w^2) (Kish, 1965), in (0, 1].
    """
    w = torch.exp(ratios.clamped)
    if not w.numel():
        names = ("mean", "max", "ess", "truncated_fraction", "truncated_mean")
        return {f"importance/{name}": 0.0 for name in names}
    return {
        "importance/mean": float(w.mean()),
        "importance/max": float(w.max()),
        # Equal weights can round to just above 1.
        "importance/ess": min(1.0, float(w.sum() ** 2 / (w.numel() * (w**2).sum()))),
        "importance/truncated_fraction": float((w > cap).to(torch.float64).mean()),
        "importance/truncated_mean": float(w.clamp(max=cap).mean()),
    }
