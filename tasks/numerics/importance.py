"""Metrics of the token-level importance weight w = e^d, d = p - q (train over rollout, `tasks.numerics.mismatch`).

They are the same whatever the correction (`tasks.numerics.correction`), so that runs can be compared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tasks.numerics.mismatch import LogRatios


def importance_metrics(ratios: LogRatios, cap: float | None, lower: float = 0.0) -> dict[str, float]:
    """`importance/*` of one batch, from the raw weights except `truncated_mean`.

    Effective sample size as a share: (sum w)^2 / (N sum w^2) (Kish, 1965), in (0, 1]. `above_fraction` and
    `below_fraction` are the shares of ratios above `cap` and below `lower`, from the unclamped d in log space.
    `cap` (above 0) None means no cap: nothing is above it and `truncated_mean` is `mean`; `lower` 0 likewise.
    """
    w = torch.exp(ratios.clamped)
    if not w.numel():
        names = ("mean", "max", "ess", "truncated_fraction", "truncated_mean", "above_fraction", "below_fraction")
        return {f"importance/{name}": 0.0 for name in names}
    limit = math.inf if cap is None else cap
    log_lower = math.log(lower) if lower > 0 else -math.inf
    return {
        "importance/mean": float(w.mean()),
        "importance/max": float(w.max()),
        # Equal weights can round to just above 1.
        "importance/ess": min(1.0, float(w.sum() ** 2 / (w.numel() * (w**2).sum()))),
        "importance/truncated_fraction": _share(w > limit),
        "importance/truncated_mean": float(w.clamp(max=limit).mean()),
        "importance/above_fraction": _share(ratios.d > math.log(limit)),
        "importance/below_fraction": _share(ratios.d < log_lower),
    }


def _share(chosen: Tensor) -> float:
    return float(chosen.to(torch.float64).mean())
