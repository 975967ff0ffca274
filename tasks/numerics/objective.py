"""The policy objective on tensors: clipped surrogate with importance weights, and KL to a reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.numerics.mismatch import CLAMP, k3


@dataclass(frozen=True)
class ObjectiveSettings:
    """Ratio clipped to [1 - clip_low, 1 + clip_high]; `kl_coef` times KL to the reference policy."""

    clip_low: float
    clip_high: float
    kl_coef: float = 0.0


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, every tensor `[sequences, tokens]`.

    `logprobs` pi under the current weights, with gradient; `old_logprobs` p, scored before any update;
    `advantages` one value a token; `weights` importance weights; `mask` bool, true at response tokens;
    `reference_logprobs` of the frozen reference, or None without a KL term.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    reference_logprobs: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """`loss` to differentiate (scalar fp32). `sums`: fp64 sums over valid tokens, for means over a batch."""

    loss: Tensor
    sums: dict[str, float]


def clipped_surrogate(ratio: Tensor, advantages: Tensor, settings: ObjectiveSettings) -> Tensor:
    """-min(r A, clip(r) A) for each token (Schulman et al., 2017)."""
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def policy_loss(inputs: LossInputs, settings: ObjectiveSettings, normalizer: float) -> LossOutputs:
    """Sum over valid tokens of w * surrogate + kl_coef * k3(reference - pi), divided by `normalizer`.

    With `normalizer` = the number of valid tokens of the whole batch, the losses of its micro-batches add
    up to the batch's token mean. Values at masked positions never enter, whatever they are.
    """
    mask = inputs.mask
    log_ratio = torch.where(mask, inputs.logprobs - inputs.old_logprobs, 0.0)
    ratio = torch.exp(log_ratio.clamp(-CLAMP, CLAMP))
    advantages = torch.where(mask, inputs.advantages, 0.0)
    weights = torch.where(mask, inputs.weights, 0.0)
    policy = weights * clipped_surrogate(ratio, advantages, settings)
    total = policy.sum()
    kl_sum = 0.0
    if inputs.reference_logprobs is not None:
        to_reference = torch.where(mask, inputs.reference_logprobs - inputs.logprobs, 0.0)
        kl = k3(to_reference.clamp(-CLAMP, CLAMP))
        total = total + settings.kl_coef * kl.sum()
        kl_sum = float(kl.detach().to(torch.float64).sum())
    above = (ratio > 1 + settings.clip_high) & (advantages > 0)
    below = (ratio < 1 - settings.clip_low) & (advantages < 0)
    sums = {
        "loss/policy": float(policy.detach().to(torch.float64).sum()),
        "loss/kl": kl_sum,
        "policy/clipped_fraction": float((above | below).sum()),
    }
    return LossOutputs(total / normalizer, sums)
