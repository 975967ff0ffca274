"""AdamW's update in fp32, and how it is added to weights: rounded, or with Kahan compensation for BF16 weights.

AdamW (arXiv 1711.05101) with gradient g, moments m and v, update number t from 1, rate r and decay d:

    m <- beta1 m + (1 - beta1) g         v <- beta2 v + (1 - beta2) g^2
    update = -r * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) - r * d * w

BF16 weights hold 8 significant bits: an update under 2^-9 |w| to 2^-8 |w| (half a step) is rounded away, and at a
rate of 1e-5 nearly all of them are. Kahan summation (Kahan 1965; for BF16 weights: arXiv 2010.06192) keeps what
was rounded away in a second BF16 tensor c and adds it to the next update, so that w + c follows the exact sum to
about 17 significant bits: only an update under 2^-17 |w| can be lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamWSettings:
    """Constants of all updates; see the module's text."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class AdamWStep:
    """fp32 tensors in the parameter's shape: `update` is to be added to the weights, the moments are new tensors."""

    update: Tensor
    first: Tensor
    second: Tensor


def adamw_step(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, number: int, rate: float, settings: AdamWSettings
) -> AdamWStep:
    """One update. `weight` in any precision, the others fp32; `number` counts this parameter's updates from 1.

    The update is computed from the moments before they are stored in fewer bits.
    """
    if number < 1:
        raise ValueError(f"updates are counted from 1, got {number}")
    first = first.lerp(grad, 1 - settings.beta1)
    second = second.mul(settings.beta2).addcmul_(grad, grad, value=1 - settings.beta2)
    denominator = second.sqrt().div_(math.sqrt(1 - settings.beta2**number)).add_(settings.eps)
    update = first.div(denominator).mul_(-rate / (1 - settings.beta1**number))
    if settings.weight_decay:
        update.add_(weight.to(torch.float32), alpha=-rate * settings.weight_decay)
    return AdamWStep(update, first, second)


def add_rounded(weight: Tensor, update: Tensor) -> Tensor:
    """`weight + update` computed in fp32 and rounded to nearest in the weight's dtype."""
    return (weight.to(torch.float32) + update).to(weight.dtype)


def kahan_add(weight: Tensor, compensation: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """The new weight and the new compensation, same shape and dtype as the old ones; `update` fp32.

    weight' = round(weight + (compensation + update)); compensation' = round(what that rounding took away).
    """
    wanted = compensation.to(torch.float32) + update
    before = weight.to(torch.float32)
    after = (before + wanted).to(weight.dtype)
    return after, (wanted - (after.to(torch.float32) - before)).to(compensation.dtype)


def largest_within(limit: float, dtype: torch.dtype) -> Tensor:
    """The largest value of `dtype` that is no more than `limit` (> 0), as a tensor without dimensions."""
    if not limit > 0:
        raise ValueError(f"a bound on weights must be positive, got {limit}")
    rounded = torch.tensor(limit, dtype=dtype)
    return rounded if float(rounded) <= limit else torch.nextafter(rounded, torch.zeros_like(rounded))


@torch.no_grad()
def clip_weights_(weight: Tensor, limit: float, compensation: Tensor | None = None) -> Tensor:
    """Clamp `weight` in place to [-limit, limit]; returns how many it changed, an int64 tensor without dimensions.

    With a compensation the bound holds for weight + compensation, and a clipped weight's compensation becomes 0.
    """
    # BF16 also for wider weights: the copy that is computed with must not round to above the limit.
    bound = largest_within(limit, torch.bfloat16).to(weight.device, weight.dtype)
    if compensation is None:
        outside = weight.abs() > bound
    else:
        outside = (weight.to(torch.float32) + compensation.to(torch.float32)).abs() > bound.to(torch.float32)
        compensation.masked_fill_(outside, 0.0)
    weight.copy_(torch.where(outside, torch.copysign(bound, weight), weight))
    return outside.sum()
