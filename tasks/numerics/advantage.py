"""Group-relative advantages: a baseline from the prompt's own group, then a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group_mean", "leave_one_out"]
Scale = Literal["group_std", "leave_one_out_std", "batch_whitened", "none"]


@dataclass(frozen=True)
class AdvantageSettings:
    """What is subtracted from a reward and what the difference is divided by.

    Baselines: `group_mean` the mean of the group (GRPO: Shao et al., 2024, arXiv 2402.03300); `leave_one_out`
    the mean of the group's other samples (RLOO: Ahmadian et al., 2024, arXiv 2402.14740).

    Scales: `group_std` the group's std (n - 1) + eps (GRPO); `leave_one_out_std` the std of the group's other
    samples (n - 2) + eps, and no division where those are all equal, as NeMo RL does: dividing by eps
    alone would give the only solved answer of a group an advantage of 1 / eps; `batch_whitened` subtract the
    mean over all response tokens of the batch, divide by their std + eps (REINFORCE++-baseline: Hu et al.,
    2025, arXiv 2501.03262); `none` (Dr. GRPO: Liu et al., 2025, arXiv 2503.20783). `eps` in reward units.
    """

    baseline: Baseline = "group_mean"
    scale: Scale = "group_std"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps = {self.eps}: allowed are finite numbers >= 0")


def advantages(rewards: Tensor, lengths: Tensor, settings: AdvantageSettings) -> Tensor:
    """Advantage of each sample, fp64 `[groups, size]`.

    `rewards` `[groups, size >= 2]`, finite; `lengths` response tokens of each sample, same shape, read by
    `batch_whitened` alone. A group whose rewards are all equal gets exactly 0, before whitening; a
    batch whose tokens all carry the same advantage is whitened to exactly 0.

    Raises `ValueError` for other shapes, a reward that is not finite, and `leave_one_out_std` on groups of 2.
    """
    _check_groups(rewards)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths must be {tuple(rewards.shape)} like rewards, got {tuple(lengths.shape)}")
    r = rewards.to(torch.float64)
    if not bool(torch.isfinite(r).all()):
        raise ValueError(f"{int((~torch.isfinite(r)).sum())} rewards are not finite")
    size = r.shape[1]
    centred = _centred(r)
    if settings.baseline == "leave_one_out":
        # R - (sum - R) / (n - 1), without the cancellation of that form.
        centred = centred * (size / (size - 1))
    if settings.scale == "group_std":
        return _divided_by_group_std(centred, r, settings.eps)
    if settings.scale == "leave_one_out_std":
        return _divided_by_others_std(centred, r, settings.eps)
    if settings.scale == "batch_whitened":
        return _whitened(centred, lengths.to(torch.float64), settings.eps)
    return centred


def zero_variance(rewards: Tensor) -> Tensor:
    """Which groups have all rewards equal: bool `[groups]`. Such a group carries no gradient."""
    return (rewards == rewards[:, :1]).all(1)


def _check_groups(rewards: Tensor) -> None:
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [groups, size >= 2], got {tuple(rewards.shape)}")


def _centred(r: Tensor) -> Tensor:
    """R - group mean; exactly 0 in groups of equal rewards, whose mean may be off by a rounding."""
    return torch.where(zero_variance(r).unsqueeze(1), 0.0, r - r.mean(1, keepdim=True))


def _divided_by_group_std(centred: Tensor, r: Tensor, eps: float) -> Tensor:
    equal = zero_variance(r).unsqueeze(1)
    return torch.where(equal, 0.0, centred / (r.std(1, keepdim=True) + eps))


def _divided_by_others_std(centred: Tensor, r: Tensor, eps: float) -> Tensor:
    size = r.shape[1]
    if size < 3:
        raise ValueError(f"scale = leave_one_out_std on groups of {size}: allowed are groups of at least 3")
    column = torch.arange(size - 1, device=r.device)
    row = torch.arange(size, device=r.device).unsqueeze(1)
    others = r[:, column + (column >= row).to(column.dtype)]
    equal = (others == others[..., :1]).all(-1)
    return torch.where(equal, centred, centred / (others.std(-1) + eps))


def _whitened(centred: Tensor, tokens: Tensor, eps: float) -> Tensor:
    """Population mean and std over the batch's tokens: every sample weighs its length."""
    present = centred[tokens > 0]
    # Decided by comparison: the mean of equal numbers can be off by a rounding, which 1 / eps would magnify.
    if not bool((present != present[:1]).any()):
        return torch.zeros_like(centred)
    total = tokens.sum()
    mean = (tokens * centred).sum() / total
    std = ((tokens * (centred - mean) ** 2).sum() / total).sqrt()
    return (centred - mean) / (std + eps)
