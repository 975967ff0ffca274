"""Group-relative advantages."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, eps: float) -> Tensor:
    """GRPO: A = (R - mean) / (std + eps) within a group, std with n - 1.

    `rewards` `[groups, group size >= 2]`; returns fp64 of the same shape. A group whose rewards are all
    equal gets exactly 0. (Shao et al., 2024, DeepSeekMath, section 4.1.)
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [groups, size >= 2], got {tuple(rewards.shape)}")
    r = rewards.to(torch.float64)
    centred = r - r.mean(1, keepdim=True)
    equal = zero_variance(rewards).unsqueeze(1)
    return torch.where(equal, 0.0, centred / (r.std(1, keepdim=True) + eps))


def zero_variance(rewards: Tensor) -> Tensor:
    """Which groups have all rewards equal: bool `[groups]`. Such a group carries no gradient."""
    return (rewards == rewards[:, :1]).all(1)
